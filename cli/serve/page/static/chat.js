// A conversation on the page: messages, and answers whose tokens are coloured by their origin.

import { byId, html } from "./dom.js";

const SHOW_EVERY = 40; // ms

export class ChatView {
  // `onRound` is told the answer and the round of a token that was clicked, `onAgain` which answer
  // is to be made again.
  constructor(onRound, onAgain) {
    this.list = byId("messages");
    this.scroll = byId("scroll");
    this.onRound = onRound;
    this.onAgain = onAgain;
    this.views = new Map(); // answers to their elements
    this.chosen = [];
  }

  show(conversation) {
    this.list.replaceChildren();
    this.views.clear();
    for (const message of conversation.messages) this.add(message);
    byId("welcome").hidden = conversation.messages.length > 0;
    this.problem("");
    this.toEnd(true);
  }

  add(message) {
    byId("welcome").hidden = true;
    const text = html("div", { class: "text", dir: "auto" });
    const item = html("li", { class: `message ${message.role}` }, text);
    item.append(html("span", { class: "unseen" }, message.role === "user" ? "You" : "Answer"));
    item.prepend(item.lastChild);
    this.list.append(item);
    if (message.role === "user") {
      text.textContent = message.content;
    } else {
      this._addAnswer(message, item, text);
    }
    this.toEnd(true);
  }

  _addAnswer(message, item, text) {
    const { answer } = message;
    const foot = html("div", { class: "foot" });
    item.append(foot);
    if (!answer) {
      text.textContent = message.content;
      this._finishFoot(foot, message);
      return;
    }
    const view = { item, text, foot, message, tokens: new Map(), pending: [], timer: null };
    this.views.set(answer, view);
    text.addEventListener("click", (event) => {
      const { round } = event.target.dataset ?? {};
      if (round !== undefined) this.onRound(answer, Number(round));
    });
    view.pending.push(...answer.pieces);
    this._flush(answer, view);
    if (answer.done) this.finish(answer);
    else item.classList.add("busy");
  }

  // Take pieces of text; they are shown together soon, because every look at where the text ends
  // lays all of it out again.
  append(answer, pieces) {
    const view = this.views.get(answer);
    if (!view) return;
    view.pending.push(...pieces);
    view.timer ??= setTimeout(() => this._flush(answer, view), SHOW_EVERY);
  }

  _flush(answer, view) {
    clearTimeout(view.timer);
    view.timer = null;
    const atEnd = this._isAtEnd();
    if (answer.thoughts) this._think(view, answer.thoughts);
    const added = document.createDocumentFragment();
    for (const { text, kind, round } of view.pending.splice(0)) {
      const token = html("span", { class: `token ${kind}`, "data-round": round }, text);
      added.append(token);
      if (round === null) continue;
      if (!view.tokens.has(round)) view.tokens.set(round, []);
      view.tokens.get(round).push(token);
    }
    view.text.append(added);
    if (atEnd) this.toEnd(true);
  }

  _think(view, thoughts) {
    view.thoughts ??= view.item.insertBefore(html("div", { class: "thoughts" }), view.text);
    view.thoughts.textContent = thoughts;
  }

  finish(answer) {
    const view = this.views.get(answer);
    if (!view) return;
    this._flush(answer, view);
    view.item.classList.remove("busy");
    this._finishFoot(view.foot, view.message);
    this.toEnd(false);
  }

  _finishFoot(foot, message) {
    const again = html("button", { type: "button", class: "quiet" }, "Answer again");
    again.addEventListener("click", () => this.onAgain(message));
    const copy = html("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(message.content);
      copy.textContent = "Copied";
    });
    copy.hidden = !navigator.clipboard; // which pages have that were not loaded over https
    foot.replaceChildren(again, copy, html("span", {}, footWords(message.answer)));
  }

  // Mark the tokens of a round; bring them into view if somebody asked for the round.
  choose(answer, round, asked) {
    for (const token of this.chosen) token.classList.remove("chosen");
    this.chosen = asked ? this.views.get(answer)?.tokens.get(round) ?? [] : [];
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

const footWords = (answer) => {
  if (!answer) return "";
  const words = [];
  const tokens = answer.usage?.completion_tokens ?? answer.rounds.at(-1)?.tokens;
  if (tokens) words.push(`${tokens} tokens`);
  if (answer.tokensPerRound) words.push(`${answer.tokensPerRound.toFixed(2)} a round`);
  if (answer.seconds) words.push(`${answer.seconds.toFixed(1)} s`);
  if (ENDS[answer.finish]) words.push(ENDS[answer.finish]);
  return words.join(" · ");
};
