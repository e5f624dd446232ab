// The page: wires the conversation, the rounds beside it and the settings to the server.

import { Answer } from "./answer.js";
import { chatChunks, getJson, ServerError } from "./api.js";
import { Attachments } from "./attachments.js";
import { ChatView } from "./chat.js";
import {
  addMessage,
  asJson,
  asMarkdown,
  changeMessage,
  deleteMessage,
  newConversation,
  sentContent,
  titleOf,
} from "./conversation.js";
import { byId, html } from "./dom.js";
import { reasonOf } from "./reasons.js";
import { RoundsView } from "./rounds.js";
import { Store } from "./store.js";
import { prepareSettings, samplingOf } from "./settings.js";

const SAVE_EVERY = 1000; // ms, while an answer comes

const store = new Store();
const answers = new Map(); // those of this tab, with their rounds, by the ids of their messages
let conversation = store.opened();
let offered = null; // what the server says of drafting
let model = ""; // the name of the one that is asked
let isAsleep = false; // whether the model is loaded when it is asked
let running = null; // { abort, answer, keep }: the answer that is being made
let isStale = false; // whether another tab has changed what is shown, and it could not be redrawn

const rounds = new RoundsView(
  (answer, index, asked) => {
    chat.choose(answer, index, asked);
    byId("tab-figure").textContent = answer.tokensPerRound?.toFixed(2) ?? "";
  },
  (answer) => {
    const hasOldAnswer = conversation.messages.some(({ role }) => role === "assistant");
    return reasonOf({ answer, hasOldAnswer, offered, chosen: byId("drafter").value });
  },
);
const chat = new ChatView(
  { round: showRound, again: answerAgain, edit: editMessage, delete: removeMessage },
  answers,
);
const attachments = new Attachments((words) => chat.problem(words));

function showRound(answer, round) {
  if (rounds.answer !== answer) rounds.watch(answer);
  rounds.choose(round);
  show("rounds");
}

// -- answers --------------------------------------------------------------------------------------

async function ask(text) {
  const files = attachments.take();
  const talk = conversation;
  const question = addMessage(talk, "user", text, files.length ? { files } : {});
  save(talk);
  store.open(talk);
  chat.show(talk);
  await answerNow(question, () => {
    deleteMessage(talk, question);
    giveBack(text, files);
  });
}

// Answer a question anew, with all that followed left out; if no answer comes all is as before.
function answerAgain(message) {
  if (running) return;
  const talk = conversation;
  const before = { dead: [...talk.dead], messages: [...talk.messages] };
  const place = talk.messages.indexOf(message);
  const next = message.role === "user" ? talk.messages[place + 1] : message;
  if (next) deleteMessage(talk, next, true);
  chat.show(talk);
  answerNow(talk.messages.at(-1), () => Object.assign(talk, before));
}

// A question that is edited is asked anew; an answer is changed in place.
function editMessage(message, text) {
  if (running) return;
  const talk = conversation;
  if (message.role === "assistant") {
    answers.delete(message.id);
    changeMessage(talk, message, { content: text });
    save(talk);
    turnTo(talk);
    return;
  }
  const before = { dead: [...talk.dead], messages: [...talk.messages] };
  deleteMessage(talk, message, true);
  const question = addMessage(talk, "user", text, message.files ? { files: message.files } : {});
  chat.show(talk);
  answerNow(question, () => {
    Object.assign(talk, before);
    giveBack(text, []);
  });
}

function removeMessage(message) {
  if (running) return;
  deleteMessage(conversation, message);
  save(conversation);
  turnTo(conversation);
}

function requestBody(talk) {
  const messages = talk.messages.map((message) => {
    return { role: message.role, content: sentContent(message) };
  });
  const system = store.settings.system?.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const speculative = { trace: true };
  if (byId("drafter").value) speculative.drafter = byId("drafter").value;
  if (store.settings.n_max) speculative.n_max = store.settings.n_max;
  const body = { messages, stream: true, stream_options: { include_usage: true }, speculative };
  if (byId("rule").value) body.accept = byId("rule").value;
  if (byId("which").value) body.model = byId("which").value;
  return { ...body, ...samplingOf(store.settings) };
}

// `undo` is called if no answer came: what was asked is not lost.
async function answerNow(question, undo) {
  const answer = new Answer();
  const talk = conversation;
  const body = requestBody(talk);
  const message = addMessage(talk, "assistant", "", { to: question?.id, partial: true });
  answers.set(message.id, answer);
  chat.problem("");
  chat.add(message);
  rounds.watch(answer);
  const abort = new AbortController();
  const keep = (fields = {}) => {
    if (!answer.text && !answer.thoughts) return;
    const said = { content: answer.text, ...fields };
    if (answer.thoughts) said.thoughts = answer.thoughts;
    changeMessage(talk, message, said);
    save(talk);
  };
  setRunning({ abort, answer, keep });
  if (isAsleep) {
    byId("model").textContent = "is being loaded …";
    byId("status").textContent = `${model} is being loaded.`;
  }
  let problem = null;
  let kept = performance.now();
  try {
    for await (const chunk of chatChunks(body, store.key, abort.signal)) {
      if (answer.take(chunk).length || answer.thoughts) chat.append(answer);
      rounds.update();
      if (performance.now() - kept < SAVE_EVERY) continue;
      keep();
      kept = performance.now();
    }
  } catch (error) {
    if (abort.signal.aborted) answer.finish = "stopped";
    else problem = error;
  }
  answer.done = true;
  setRunning(null);
  keep({ partial: problem || answer.finish === "stopped" ? true : undefined });
  chat.finish(answer);
  const isEmpty = !answer.text && !answer.thoughts;
  if (isEmpty && (problem || answer.finish === "stopped")) takeBack(talk, message, undo);
  else if (isStale) turnTo(talk);
  if (problem) explain(problem);
  rounds.update();
  if (isAsleep) readProps();
  listConversations();
  byId("status").textContent = `The answer has ended: ${answer.rounds.at(-1)?.tokens ?? 0} tokens.`;
}

// Make all as it was before an answer that did not come.
function takeBack(talk, message, undo) {
  answers.delete(message.id);
  talk.messages = talk.messages.filter((each) => each !== message);
  undo();
  save(talk);
  if (talk === conversation) turnTo(talk);
}

function giveBack(text, files) {
  if (!box.value) box.value = text;
  if (!attachments.files.length) attachments.give(files);
  fit();
}

function explain(problem) {
  const known = problem instanceof ServerError;
  chat.problem(known ? problem.message : `The answer broke off: ${problem.message}`);
  if (problem.status === 401) {
    byId("settings").showModal();
    byId("key").focus();
  }
}

function setRunning(now) {
  running = now;
  const send = byId("send");
  send.textContent = now ? "Stop" : "Send";
  send.classList.toggle("stops", Boolean(now));
  byId("messages").setAttribute("aria-busy", String(Boolean(now)));
  for (const id of ["conversation", "new-conversation", "clear-conversation"]) {
    byId(id).disabled = Boolean(now);
  }
}

const stop = () => running?.abort.abort();

// -- conversations --------------------------------------------------------------------------------

// Keep a conversation; what cannot be kept is said, and stays in this tab.
function save(talk) {
  if (talk.messages.length) store.save(talk);
  else store.delete(talk);
  tellStorage();
  listConversations();
}

function tellStorage() {
  byId("storage").textContent = store.problem;
  byId("storage").hidden = !store.problem;
}

function listConversations() {
  const known = store.conversations;
  if (!known.includes(conversation)) known.unshift(conversation);
  // An open list stays open while other tabs write what it does not show.
  const names = known.map((each) => [each.id, titleOf(each)]);
  const listed = JSON.stringify([conversation.id, ...names]);
  byId("export").hidden = !conversation.messages.length;
  if (byId("conversation").dataset.listed === listed) return;
  byId("conversation").dataset.listed = listed;
  const options = known.map((each) => {
    const option = html("option", { value: each.id }, titleOf(each));
    option.selected = each === conversation;
    return option;
  });
  byId("conversation").replaceChildren(...options);
}

function turnTo(other) {
  conversation = other;
  isStale = false;
  store.open(other);
  chat.show(other);
  rounds.watch(other.messages.map(({ id }) => answers.get(id)).findLast(Boolean) ?? null);
  listConversations();
}

byId("conversation").addEventListener("change", (event) => {
  turnTo(store.known.get(event.target.value) ?? conversation);
});
byId("new-conversation").addEventListener("click", () => {
  turnTo(newConversation());
  byId("message").focus();
});
byId("clear-conversation").addEventListener("click", () => {
  store.delete(conversation);
  tellStorage();
  turnTo(newConversation());
});

const download = (name, type, text) => {
  const address = URL.createObjectURL(new Blob([text], { type }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
};
const fileName = () => {
  const words = titleOf(conversation).match(/[\p{L}\p{N}]+/gu) ?? [];
  return words.join("-").toLowerCase().slice(0, 50) || "conversation";
};
const EXPORTS = {
  markdown: ["md", "text/markdown", asMarkdown],
  json: ["json", "application/json", asJson],
};
for (const [name, [ending, type, write]] of Object.entries(EXPORTS)) {
  byId(`export-${name}`).addEventListener("click", () => {
    byId("export").open = false;
    download(`${fileName()}.${ending}`, type, write(conversation, model));
  });
}

document.addEventListener("click", (event) => {
  if (!byId("export").contains(event.target)) byId("export").open = false;
});

// Other tabs write to the same storage: what they change is taken over, and deletes nothing here.
window.addEventListener("storage", (event) => {
  const wasKnown = store.known.has(conversation.id);
  const changed = store.take(event);
  if (changed === null) return;
  tellStorage();
  listConversations();
  if (changed !== undefined && changed !== conversation.id) return;
  isStale = running || chat.isEditing;
  if (isStale) return;
  if (!wasKnown) return;
  if (!store.known.has(conversation.id)) turnTo(newConversation());
  else chat.stay(() => turnTo(conversation));
});
window.addEventListener("pagehide", () => running?.keep());
window.addEventListener("beforeunload", (event) => {
  if (store.unsaved.size) event.preventDefault();
});

// -- the message box ------------------------------------------------------------------------------

const box = byId("message");
const fit = () => {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
};
box.addEventListener("input", fit);
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) byId("composer").requestSubmit();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    stop();
    return;
  }
  const text = box.value.trim();
  if (!text && !attachments.files.length) return;
  box.value = "";
  fit();
  ask(text);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !byId("settings").open) stop();
});

// -- views of a narrow screen ---------------------------------------------------------------------

const tabs = ["chat", "rounds"];
function show(view) {
  document.querySelector(".columns").dataset.view = view;
  for (const each of tabs) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === view));
    tab.tabIndex = each === view ? 0 : -1;
  }
}
for (const each of tabs) {
  byId(`tab-${each}`).addEventListener("click", () => show(each));
  byId(`tab-${each}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = each === "chat" ? "rounds" : "chat";
    show(other);
    byId(`tab-${other}`).focus();
  });
}

// -- what the server offers -----------------------------------------------------------------------

const offer = (select, choices, own) => {
  const first = html("option", { value: "" }, own ?? "server's");
  const others = choices.filter((choice) => choice !== own);
  const options = others.map((choice) => html("option", { value: choice }, choice));
  select.replaceChildren(first, ...options);
  select.closest(".choice").title = own ? `The server's own is ${own}` : "";
  select.disabled = others.length === 0;
};

// The models of a server that has several: the one that was chosen last, else one that is loaded.
async function readModels() {
  const { data } = await getJson("v1/models", store.key);
  const known = data.map(({ id }) => id);
  const loaded = data.find(({ status }) => status?.value === "loaded");
  const last = known.includes(store.settings.model) ? store.settings.model : null;
  const options = known.map((id) => html("option", { value: id }, id));
  byId("which").replaceChildren(...options);
  byId("which").value = last ?? loaded?.id ?? known[0];
}

async function readProps() {
  try {
    let props = await getJson("props", store.key);
    const hasSeveral = props.role === "router";
    if (hasSeveral) {
      await readModels();
      const name = byId("which").value;
      props = await getJson(`props?model=${encodeURIComponent(name)}`, store.key);
      if (name !== byId("which").value) return; // another one was chosen meanwhile
    }
    byId("models").hidden = !hasSeveral;
    isAsleep = Boolean(props.is_sleeping);
    const told = props.speculative ?? {};
    offered = told;
    model = props.model_alias || props.model_path || "";
    const own = hasSeveral ? "" : model;
    byId("model").textContent = isAsleep ? `${own} loads with the first question`.trim() : own;
    offer(byId("drafter"), told.drafters ?? [], told.drafter);
    offer(byId("rule"), told.rules ?? [], told.accept);
  } catch (problem) {
    offer(byId("drafter"), []);
    offer(byId("rule"), []);
    if (problem.status === 401) explain(problem);
  }
  rounds.update();
}
byId("which").addEventListener("change", () => {
  store.set("model", byId("which").value);
  readProps();
});
byId("drafter").addEventListener("change", () => rounds.update());

prepareSettings(store, {
  onKey: readProps,
  onForget: () => {
    store.deleteAll();
    tellStorage();
    turnTo(newConversation());
  },
});
tellStorage();
turnTo(conversation);
readProps();
box.focus();
