"""A file of requests in OpenAI's batch format, answered without a server.

    python examples/batch_file.py [FOLDER, FILE OR HUB ID OF A MODEL]

The same as `sharesd generate --prompts requests.jsonl --out answers.jsonl`: answers come in the order of the requests,
a line that cannot be answered fails alone, and after an interruption the same command resumes.
"""

import json
import sys
import tempfile
from pathlib import Path

from sharesd_command import main as sharesd

QUESTIONS = ("Why is the sky blue?", "Name three colours of the rainbow.", "What is a prime number?")


def request(number, question):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0.7, "seed": number}
    return {"custom_id": f"question-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def main(target=None):
    with tempfile.TemporaryDirectory() as folder:
        requests, answers = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
        lines = [json.dumps(request(number, question)) for number, question in enumerate(QUESTIONS)]
        requests.write_text("\n".join(lines) + "\n", "utf-8")
        options = ["--target", target] if target else []
        status = sharesd(["generate", "--prompts", str(requests), "--out", str(answers), "--max-batch", "4", *options])
        for line in map(json.loads, answers.read_text("utf-8").splitlines()):
            print(line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"])
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
