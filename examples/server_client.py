"""A client of the server: a streamed chat answer, then one that follows a JSON schema.

    sharesd serve --mode auto
    python examples/server_client.py http://127.0.0.1:8000

Any OpenAI client works; this one is the `openai` package.
"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}},
    "required": ["colours"],
    "additionalProperties": False,
}


def main(url="http://127.0.0.1:8000"):
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=48, seed=1, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=96,
        seed=1,  # the same seed gives the same text, in every mode and next to any other requests
        temperature=0.7,
        response_format={"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}},
    )
    choice = answer.choices[0]
    print(json.loads(choice.message.content) if choice.finish_reason == "stop" else "max_tokens was too low")


if __name__ == "__main__":
    main(*sys.argv[1:])
