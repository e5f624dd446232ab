// The page: wires the conversation, the rounds beside it and the settings to the server.

import { Answer } from "./answer.js";
import { chatChunks, getJson, ServerError } from "./api.js";
import { ChatView } from "./chat.js";
import { byId, html } from "./dom.js";
import { RoundsView } from "./rounds.js";
import { Store, titleOf } from "./store.js";
import { prepareSettings, samplingOf } from "./settings.js";

const store = new Store();
let conversation = store.begin();
let running = null; // { abort, answer }: the answer that is being made

const rounds = new RoundsView((answer, index, asked) => {
  chat.choose(answer, index, asked);
  byId("tab-figure").textContent = answer.tokensPerRound?.toFixed(2) ?? "";
});
const chat = new ChatView(showRound, answerAgain);

function showRound(answer, round) {
  if (rounds.answer !== answer) rounds.watch(answer);
  rounds.choose(round);
  show("rounds");
}

// -- answers --------------------------------------------------------------------------------------

async function ask(text) {
  conversation.messages.push({ role: "user", content: text });
  chat.add(conversation.messages.at(-1));
  listConversations();
  await answerNow();
}

function answerAgain(message) {
  if (running) return;
  const place = conversation.messages.indexOf(message);
  if (place < 0) return;
  conversation.messages.length = place;
  chat.show(conversation);
  answerNow();
}

function requestBody() {
  const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
  const system = store.settings.system?.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const speculative = { trace: true };
  if (byId("drafter").value) speculative.drafter = byId("drafter").value;
  if (store.settings.n_max) speculative.n_max = store.settings.n_max;
  const body = { messages, stream: true, stream_options: { include_usage: true }, speculative };
  if (byId("rule").value) body.accept = byId("rule").value;
  return { ...body, ...samplingOf(store.settings) };
}

async function answerNow() {
  const answer = new Answer();
  const body = requestBody();
  const message = { role: "assistant", content: "", answer };
  const talk = conversation;
  talk.messages.push(message);
  chat.problem("");
  chat.add(message);
  rounds.watch(answer);
  const abort = new AbortController();
  setRunning({ abort, answer });
  let problem = null;
  try {
    for await (const chunk of chatChunks(body, store.key, abort.signal)) {
      chat.append(answer, answer.take(chunk));
      rounds.update();
    }
  } catch (error) {
    if (abort.signal.aborted) answer.finish = "stopped";
    else problem = error;
  }
  answer.done = true;
  message.content = answer.text;
  chat.finish(answer);
  const isEmpty = !answer.text && !answer.thoughts;
  if (isEmpty && (problem || answer.finish === "stopped")) takeBack(talk, message);
  if (problem) explain(problem);
  rounds.update();
  setRunning(null);
  store.save();
  listConversations();
  byId("status").textContent = `The answer has ended: ${answer.rounds.at(-1)?.tokens ?? 0} tokens.`;
}

// Give a question back to the message box: it got no answer.
function takeBack(talk, message) {
  const place = talk.messages.indexOf(message);
  const [asked] = talk.messages.splice(place - 1, 2);
  if (!box.value) box.value = asked.content;
  fit();
  chat.show(talk);
  const last = talk.messages.findLast((each) => each.answer);
  rounds.watch(last?.answer ?? null);
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

function listConversations() {
  const options = store.conversations.map((each, index) => {
    const option = html("option", { value: index }, titleOf(each));
    option.selected = each === conversation;
    return option;
  });
  byId("conversation").replaceChildren(...options);
}

function turnTo(other) {
  conversation = other;
  chat.show(other);
  const last = other.messages.findLast((message) => message.answer);
  rounds.watch(last?.answer ?? null);
  listConversations();
}

byId("conversation").addEventListener("change", (event) => {
  turnTo(store.conversations[event.target.value]);
});
byId("new-conversation").addEventListener("click", () => {
  turnTo(store.begin());
  byId("message").focus();
});
byId("clear-conversation").addEventListener("click", () => {
  conversation.messages.length = 0;
  store.save();
  turnTo(conversation);
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
  if (!text) return;
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

async function readProps() {
  try {
    const props = await getJson("props", store.key);
    const told = props.speculative ?? {};
    byId("model").textContent = props.model_alias || props.model_path || "";
    offer(byId("drafter"), told.drafters ?? [], told.drafter);
    offer(byId("rule"), told.rules ?? [], told.accept);
  } catch (problem) {
    offer(byId("drafter"), []);
    offer(byId("rule"), []);
    if (problem.status === 401) explain(problem);
  }
}

prepareSettings(store, {
  onKey: readProps,
  onForget: () => {
    store.forgetAll();
    turnTo(store.conversations[0]);
  },
});
listConversations();
chat.show(conversation);
readProps();
box.focus();
