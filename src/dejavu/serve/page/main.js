// The form and the conversation.

import { ApiError, complete, models } from "./api.js";
import { Answer } from "./answer.js";

const $ = (id) => document.getElementById(id);
const state = { models: [], messages: [], running: null };

const model = () => state.models.find((one) => one.id === $("model").value);
const mode = () => document.querySelector("input[name=mode]:checked").value;

async function load() {
  try {
    state.models = await models($("key").value);
  } catch (error) {
    return fail(error);
  }
  fail(null);
  $("model").replaceChildren(...state.models.map((one) => new Option(one.id, one.id)));
  choose();
}

function choose() {
  const chosen = model();
  const levels = chosen.sparsity.filter((name) => name !== "dense" && name !== "plan");
  $("level").replaceChildren(...levels.map((name) => new Option(name, name, name === chosen.level, name === chosen.level)));
  const planned = levels.length > 0;
  $("level").disabled = !planned;
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.disabled = !planned && radio.value !== "dense";
    if (!planned) radio.checked = radio.value === "dense";
  }
  $("prompt-label").textContent = chosen.chat ? "Message" : "Text to continue";
  clear();
}

function clear() {
  state.running?.abort();
  state.messages = [];
  $("turns").replaceChildren();
  $("status").textContent = "";
}

async function send() {
  const chosen = model();
  const prompt = $("prompt").value;
  if (!chosen || state.running) return;
  fail(null);
  const levels = { sparse: [$("level").value], dense: ["dense"], both: ["dense", $("level").value] }[mode()];
  const turn = newTurn(prompt);
  const asked = [...state.messages, { role: "user", content: prompt }];
  const body = {
    ...(chosen.chat ? { messages: asked } : { prompt }),
    max_tokens: Number($("tokens").value) || undefined,
    temperature: Number($("temperature").value),
    seed: Math.floor(Math.random() * 2 ** 31), // the same for both of a pair
  };
  busy(new AbortController());
  const answers = levels.map((level) => new Answer(turn, level, chosen.shape));
  try {
    await Promise.all(levels.map((level, i) => follow(answers, i, chosen, { ...body, sparsity: level })));
    state.messages = [...asked, { role: "assistant", content: answers.at(-1).said }];
    report(answers);
  } catch (error) {
    state.running.abort(); // the other of a pair
    if (error.name === "AbortError") $("status").textContent = "Stopped.";
    else fail(error);
  }
  busy(null);
  $("prompt").focus();
}

async function follow(answers, place, chosen, body) {
  const answer = answers[place];
  for await (const token of complete(chosen, body, $("key").value, state.running.signal)) {
    answer.add(token);
    if (answers.length > 1) answers.forEach((one, i) => one.compare(answers[1 - i]));
  }
}

function report(answers) {
  const place = answers.length > 1 ? answers[0].compare(answers[1]) : -1;
  const same = answers.length > 1 ? (place < 0 ? " Both say the same." : ` They differ from token ${place + 1} on.`) : "";
  $("status").textContent = `Done, ${answers.map((answer) => answer.tokens.length).join(" and ")} tokens.${same}`;
}

function newTurn(prompt) {
  const turn = document.createElement("section");
  turn.className = "turn";
  const title = document.createElement("h2");
  title.textContent = "You";
  const asked = document.createElement("p");
  asked.className = "asked";
  asked.textContent = prompt;
  const pair = document.createElement("div");
  pair.className = "pair";
  turn.append(title, asked, pair);
  $("turns").prepend(turn); // below the form stands what is newest
  return pair;
}

function busy(running) {
  state.running = running;
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  if (running) $("status").textContent = "Answering.";
}

function fail(error) {
  $("error").hidden = error === null;
  $("error").textContent = error?.message ?? "";
  if (error && !(error instanceof ApiError)) throw error;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("clear").addEventListener("click", clear);
$("model").addEventListener("change", choose);
$("key").addEventListener("change", load);
load();
