// The conversation: asks, stops, compares.

import { chat, servedModel, ServerError } from "./api.js";
import { Answer } from "./answer.js";
import { firstDifference, verdict } from "./compare.js";

const $ = (id) => document.getElementById(id);
const log = $("log");

let messages = []; // of this chat, in OpenAI's form; New chat begins another list
let running = null; // AbortController of the answer that comes
let model = "";
let key = ""; // lives as long as the page

async function ask(question) {
  const own = messages;
  const asked = [...own, { role: "user", content: question }];
  const stopper = (running = new AbortController());
  const compare = $("compare").checked;
  showBusy(true);
  log.append(element("p", "question", question));
  const answers = compare ? [new Answer("with speculation"), new Answer("without")] : [new Answer("Answer")];
  const pair = element("div", compare ? "pair" : "");
  pair.append(...answers.map((answer) => answer.element));
  const judged = element("p", "verdict");
  if (compare) pair.append(judged);
  log.append(pair);
  log.scrollTop = log.scrollHeight;
  const body = { ...sampling(), messages: asked };
  for (const [i, answer] of answers.entries()) { // one after the other: each speed is that of a request alone
    await receive(answer, { ...body, speculate: compare ? i === 0 : $("speculate").checked }, stopper.signal);
    if (!answer.complete) break;
  }
  const [answer] = answers;
  if (compare && answers.every((each) => each.complete)) {
    const at = firstDifference(...answers);
    answers.forEach((each) => each.markDifference(at));
    const { outcome, speeds } = verdict(...answers, at);
    keepInView(() => judged.append(element("strong", "", outcome), `\n${speeds}`));
  }
  const thought = answer.reasoning ? { reasoning_content: answer.reasoning } : {};
  if (answer.complete || answer.text) own.push(asked.at(-1), { role: "assistant", content: answer.text, ...thought });
  else if (own === messages) $("question").value ||= question; // nothing came: it can be asked again
  if (running === stopper) showBusy(false);
  $("status").textContent = judged.textContent || answers.map((each) => each.element.querySelector(".end").textContent).join(" ") || "Answer complete.";
}

async function receive(answer, body, signal) {
  try {
    await findModel();
    const stream = await withKey((key) => chat({ model, ...body }, { key, signal }));
    for await (const chunk of stream) keepInView(() => answer.add(chunk));
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") keepInView(() => answer.end("Stopped."));
    else if (error instanceof ServerError) keepInView(() => answer.end(error.message, true));
    else throw error;
  }
}

async function findModel() {
  model ||= await withKey((key) => servedModel(key));
  $("model").textContent = model;
}

/** Settings of the request, in the server's names. */
function sampling() {
  const rounds = $("rounds").checked ? { round_details: true } : {};
  return { temperature: $("temperature").valueAsNumber, seed: $("seed").valueAsNumber, max_tokens: $("max-tokens").valueAsNumber, ...rounds };
}

/** What `call(key)` gives; where the server wants a key, the user is asked for one. */
async function withKey(call) {
  for (;;) {
    try {
      return await call(key);
    } catch (error) {
      if (error.status !== 401) throw error;
      key = await askKey(error.message);
      if (!key) throw error;
    }
  }
}

function askKey(reason) {
  const dialog = $("key-dialog");
  $("key-reason").textContent = reason;
  $("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" ? $("key").value : ""), { once: true });
  });
}

/** Change the log, and stay at its end if it was there. */
function keepInView(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function showBusy(busy) {
  if (!busy) running = null;
  $("send").textContent = busy ? "Stop" : "Send";
  log.setAttribute("aria-busy", busy); // a screen reader reads the answer when it is whole
  $("status").textContent = busy ? "Answering." : "";
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function send() {
  const question = $("question").value.trim();
  if (running || !question) return;
  const wrong = $("settings").querySelector("input:invalid");
  if (wrong) {
    $("settings").open = true;
    wrong.reportValidity();
    return;
  }
  $("question").value = "";
  ask(question);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) running?.abort();
});
$("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren();
  showBusy(false);
  $("question").focus();
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("compare").addEventListener("change", () => ($("speculate").disabled = $("compare").checked));

$("settings").open = matchMedia("(min-width: 32rem)").matches;
try {
  await findModel();
} catch (error) {
  if (!(error instanceof ServerError)) throw error;
  $("model").textContent = error.message;
}
