// A conversation on the page: messages, and answers whose tokens are coloured by their origin.

import { fileElement } from "./attachments.js";
import { byId, html } from "./dom.js";
import { Prose } from "./prose.js";

const SHOW_EVERY = 40; // ms
const PAUSES_PER_DRAWING = 9; // at most a tenth of the time goes into drawing

const button = (name, onClick) => {
  const element = html("button", { type: "button", class: "quiet" }, name);
  element.addEventListener("click", onClick);
  return element;
};

export class ChatView {
  // `on` has what to do: `round(answer, round)` for a token that was clicked, `again(message)`,
  // `edit(message, text)`, `delete(message)`. `answers` are those of this tab, by their messages.
  constructor(on, answers) {
    this.list = byId("messages");
    this.scroll = byId("scroll");
    this.on = on;
    this.answers = answers;
    this.views = new Map(); // answers to their elements
    this.chosen = [];
  }

  get isEditing() {
    return this.list.querySelector(".edit") !== null;
  }

  show(conversation) {
    this.list.replaceChildren();
    this.views.clear();
    for (const message of conversation.messages) this.add(message);
    const last = conversation.messages.at(-1);
    if (last?.role === "user") this._offerAnswer(last);
    byId("welcome").hidden = conversation.messages.length > 0;
    this.problem("");
    this.toEnd(true);
  }

  add(message) {
    byId("welcome").hidden = true;
    const text = html("div", { class: "text", dir: "auto" });
    const foot = html("div", { class: "foot" });
    const who = html("span", { class: "unseen" }, message.role === "user" ? "You" : "Answer");
    const item = html("li", { class: `message ${message.role}` }, who, text, foot);
    this.list.append(item);
    if (message.role === "user") {
      text.textContent = message.content;
      text.hidden = !message.content;
      foot.before(...(message.files ?? []).map(fileElement));
      foot.append(...this._changes(message, item));
    } else {
      this._addAnswer(message, item, text, foot);
    }
    this.toEnd(true);
  }

  _addAnswer(message, item, text, foot) {
    const answer = this.answers.get(message.id);
    const prose = new Prose(text, answer?.pieces);
    const view = { item, text, foot, message, prose, timer: null };
    if (!answer) {
      this._think(view, message.thoughts ?? "", false);
      prose.draw(message.content);
      this._finishFoot(view);
      return;
    }
    this.views.set(answer, view);
    text.addEventListener("click", (event) => {
      const { round } = event.target.closest(".token")?.dataset ?? {};
      if (round !== undefined) this.on.round(answer, Number(round));
    });
    if (answer.done) this.finish(answer);
    else {
      item.classList.add("busy");
      this._flush(answer, view);
    }
  }

  // An answer has grown; it is drawn soon, because every look at where the text ends lays all of
  // it out again.
  append(answer) {
    const view = this.views.get(answer);
    if (view) view.timer ??= setTimeout(() => this._flush(answer, view), view.pause ?? SHOW_EVERY);
  }

  _flush(answer, view) {
    clearTimeout(view.timer);
    view.timer = null;
    const began = performance.now();
    const atEnd = this._isAtEnd();
    this._think(view, answer.thoughts, !answer.done && !answer.text);
    view.prose.draw(answer.text, !answer.done);
    if (atEnd) this.toEnd(true);
    view.pause = Math.max(SHOW_EVERY, PAUSES_PER_DRAWING * (performance.now() - began));
  }

  // Thoughts are folded away; they are drawn where somebody unfolds them.
  _think(view, thoughts, isThinking) {
    if (!thoughts.trim()) return;
    if (!view.thoughts) {
      const [summary, inner] = [html("summary"), html("div", { class: "inner", dir: "auto" })];
      const details = html("details", { class: "thoughts" }, summary, inner);
      view.item.insertBefore(details, view.text);
      view.thoughts = { details, summary, prose: new Prose(inner), text: "" };
      details.addEventListener("toggle", () => this._drawThoughts(view.thoughts));
    }
    const count = thoughts.trim().split(/\s+/).length;
    const words = isThinking ? "Thinking …" : "Thoughts";
    view.thoughts.summary.textContent = `${words} (${count} ${count === 1 ? "word" : "words"})`;
    Object.assign(view.thoughts, { text: thoughts, isThinking });
    this._drawThoughts(view.thoughts);
  }

  _drawThoughts({ details, prose, text, isThinking }) {
    if (details.open) prose.draw(text, isThinking);
  }

  finish(answer) {
    const view = this.views.get(answer);
    if (!view) return;
    this._flush(answer, view);
    view.item.classList.remove("busy");
    this._finishFoot(view);
    this.toEnd(false);
  }

  _finishFoot({ foot, item, message }) {
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(message.content);
      copy.textContent = "Copied";
    });
    copy.hidden = !navigator.clipboard; // which pages have that were not loaded over https
    const again = button("Answer again", () => this.on.again(message));
    const words = footWords(this.answers.get(message.id), message);
    foot.replaceChildren(again, copy, ...this._changes(message, item), html("span", {}, words));
  }

  // A question that has no answer, after a reload in the middle of it, can be answered.
  _offerAnswer(message) {
    this.list.lastChild
      .querySelector(".foot")
      .prepend(button("Answer", () => this.on.again(message)));
  }

  _changes(message, item) {
    const edit = button("Edit", () => this._edit(message, item));
    return [edit, button("Delete", () => this.on.delete(message))];
  }

  _edit(message, item) {
    if (this.list.getAttribute("aria-busy") === "true") return;
    const before = [...item.children].filter((each) => !each.matches("span, .file"));
    const shown = before.filter((each) => !each.hidden);
    const box = html("textarea", { rows: Math.min(12, message.content.split("\n").length + 1) });
    box.setAttribute("aria-label", "Edited message");
    box.value = message.content;
    const form = html("form", { class: "edit" }, box);
    const close = () => {
      form.remove();
      for (const each of shown) each.hidden = false;
      item.querySelector(".foot button")?.focus();
    };
    const save = html("button", { type: "submit", class: "quiet" }, "Save");
    form.append(html("div", { class: "foot" }, save, button("Cancel", close)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!box.value.trim() && !message.files) return;
      close();
      if (box.value !== message.content) this.on.edit(message, box.value.trim());
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    for (const each of shown) each.hidden = true;
    item.append(form);
    box.focus();
  }

  // Mark the tokens of a round; bring them into view if somebody asked for the round.
  choose(answer, round, asked) {
    for (const token of this.chosen) token.classList.remove("chosen");
    const text = asked ? this.views.get(answer)?.text : null;
    this.chosen = [...(text?.querySelectorAll(`[data-round="${round}"]`) ?? [])];
    for (const token of this.chosen) token.classList.add("chosen");
    this.chosen[0]?.scrollIntoView({ block: "nearest" });
  }

  problem(words) {
    const element = byId("problem");
    element.textContent = words;
    element.hidden = !words;
    if (words) this.toEnd(true);
  }

  _isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroll;
    return scrollTop + clientHeight > scrollHeight - 60;
  }

  toEnd(always) {
    if (always || this._isAtEnd()) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

const ENDS = {
  abort: "cut short by the server",
  length: "cut at the limit",
  stopped: "stopped",
  tool_calls: "called a tool",
};

const footWords = (answer, message) => {
  if (!answer) return message.partial ? "broken off" : "";
  const words = [];
  const tokens = answer.usage?.completion_tokens ?? answer.rounds.at(-1)?.tokens;
  if (tokens) words.push(`${tokens} tokens`);
  if (answer.tokensPerRound) words.push(`${answer.tokensPerRound.toFixed(2)} a round`);
  if (answer.seconds) words.push(`${answer.seconds.toFixed(1)} s`);
  if (ENDS[answer.finish]) words.push(ENDS[answer.finish]);
  return words.join(" · ");
};
