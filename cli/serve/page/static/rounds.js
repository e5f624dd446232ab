// The rounds beside the chat: the chosen round of an answer, and the answer's figures so far.

import { countDrafts } from "./answer.js";
import { byId, html, milliseconds, percent } from "./dom.js";
import { drawLaw } from "./laws.js";
import { Tape } from "./tape.js";
import { TreeView } from "./tree.js";

const EMPTY =
  "The rounds of an answer appear here: what was drafted, what was kept, and where the time went.";
const DRAW_EVERY = 110; // ms: rounds may come faster than anybody can see

const LONGEST_GROWTH = 650; // ms
const FAST = 250; // ms from round to round

export class RoundsView {
  // `onChoose` is told which round is shown, and whether somebody chose it. `reasonOf` an answer
  // says why there is nothing to see, "" if there is.
  constructor(onChoose, reasonOf) {
    this.onChoose = onChoose;
    this.reasonOf = reasonOf;
    this.answer = null;
    this.index = -1;
    this.follows = true;
    this.drawnAt = this.treeDrawnAt = 0;
    this.timer = null;
    this.tree = new TreeView(byId("tree"), (place) => this._drawLaw(place));
    this.tape = new Tape(byId("tape"), (index) => this.choose(index));
    byId("previous").addEventListener("click", () => this.choose(this.index - 1));
    byId("next").addEventListener("click", () => this.choose(this.index + 1));
    byId("follow").addEventListener("click", () => this.follow(!this.follows));
    byId("tree").addEventListener("focusin", () => this._follows(false));
    new ResizeObserver(() => this._schedule()).observe(byId("tree"));
  }

  // Show an answer from now on; `update` says that it has grown.
  watch(answer) {
    this.answer = answer;
    for (const element of [byId("tree"), byId("law")]) element.style.minHeight = "";
    this.follow(true);
    this.update();
  }

  update() {
    if (this.follows && this.answer) this.index = this.answer.rounds.length - 1;
    this._schedule();
  }

  choose(index) {
    if (!this.answer?.rounds[index]) return;
    this.index = index;
    this._follows(false);
    this._draw();
    this.onChoose(this.answer, index, true);
  }

  follow(follows) {
    this._follows(follows);
    this.update();
  }

  _follows(follows) {
    this.follows = follows;
    byId("follow").setAttribute("aria-pressed", String(follows));
  }

  _schedule() {
    if (this.timer !== null) return;
    const wait = Math.max(0, DRAW_EVERY - (performance.now() - this.drawnAt));
    this.timer = setTimeout(() => {
      this.timer = null;
      this._draw();
    }, wait);
  }

  _draw() {
    this.drawnAt = performance.now();
    const { answer } = this;
    const round = answer?.rounds[this.index];
    byId("round-panel").hidden = !round;
    byId("no-rounds").hidden = Boolean(round);
    const reason = this.reasonOf(answer);
    byId("no-rounds").textContent = reason || EMPTY;
    byId("no-drafts").textContent = reason;
    byId("no-drafts").hidden = !reason;
    if (!round) return;
    this.tape.draw(answer.rounds, this.index);
    byId("previous").disabled = this.index === 0;
    byId("next").disabled = this.index === answer.rounds.length - 1;
    byId("round-note").textContent = roundWords(round, this.index, answer.rounds.length);
    const isNew = this.round !== round;
    const width = byId("tree").clientWidth;
    if (isNew || width !== this.width) {
      this.round = round;
      this.width = width;
      this.rootText = lastToken(answer, this.index);
      this.tree.draw(round, this.rootText, isNew ? this._growth() : 0);
      this._drawLaw(null);
      if (this.follows) keepHeights();
    }
    drawFigures(byId("figures"), answer);
    drawDepths(byId("depths"), answer.rounds[this.index].acceptance_by_depth);
    drawTimes(byId("times"), answer, this.index);
    if (isNew) this.onChoose(answer, this.index, false);
  }

  // A tree is whole before the next one takes its place; where rounds come fast nothing moves.
  _growth() {
    const now = performance.now();
    const since = now - this.treeDrawnAt;
    this.treeDrawnAt = now;
    return since < FAST ? 0 : Math.min(LONGEST_GROWTH, 0.8 * since);
  }

  _drawLaw(place) {
    if (this.round) drawLaw(byId("law"), byId("law-note"), this.round, place, this.rootText);
  }
}

// While rounds pass by, what is below them stays where it is.
const keepHeights = () => {
  for (const element of [byId("tree"), byId("law")]) {
    element.style.minHeight = `${element.offsetHeight}px`;
  }
};

const lastToken = (answer, index) => {
  const before = answer.rounds[index - 1];
  if (!before) return "(prompt)";
  const end = before.path.at(-1);
  return before.next_token?.text ?? before.nodes[end]?.text ?? "";
};

const roundWords = (round, index, count) => {
  const drafted = countDrafts(round);
  const beside = round.nodes.length - drafted;
  const words = [`Round ${index + 1} of ${count}`];
  words.push(drafted ? `${round.path.length} of ${drafted} drafts kept` : "nothing drafted");
  if (beside) words.push(`${beside} nodes beside them only look ahead`);
  words.push(round.rule === "exact" ? round.drafter : `${round.drafter}, ${round.rule}`);
  return words.join(" · ");
};

const figure = (name, value, unit = "") =>
  html("div", {}, html("dt", {}, name), html("dd", {}, value, html("small", {}, unit)));

const drawFigures = (list, answer) => {
  const { rounds } = answer;
  const drafted = rounds.reduce((sum, round) => sum + countDrafts(round), 0);
  const kept = rounds.reduce((sum, round) => sum + round.path.length, 0);
  const cost = rounds.at(-1).evaluation;
  const tokens = rounds.at(-1).tokens;
  const decoding = rounds.reduce((sum, { seconds }) => sum + total(seconds), 0);
  const perRound = answer.tokensPerRound;
  list.replaceChildren(
    figure("tokens a round", perRound === null ? "–" : perRound.toFixed(2)),
    figure("drafts kept", drafted ? percent(kept / drafted) : "–"),
    figure("tokens a second", decoding > 0 ? String(Math.round(tokens / decoding)) : "–"),
    figure(
      `cost of ${cost.together} tokens`,
      (cost.expected_s / cost.single_s).toFixed(2),
      " × one",
    ),
  );
};

const total = (seconds) => Object.values(seconds).reduce((sum, value) => sum + value, 0);

const drawDepths = (element, shares) => {
  const bars = shares.map((share, index) => {
    const fill = html("i");
    fill.style.height = `${share * 100}%`;
    return html(
      "div",
      { title: `depth ${index + 1}: ${percent(share)}` },
      html("span", { class: "well" }, fill),
      html("span", {}, String(index + 1)),
    );
  });
  const words = shares.map((share, index) => `depth ${index + 1} ${percent(share)}`).join(", ");
  const label = words ? `Share of rounds that kept a draft: ${words}` : "No drafts";
  element.setAttribute("aria-label", label);
  element.replaceChildren(...bars);
  if (!bars.length) element.append(html("p", { class: "note" }, "Nothing was drafted."));
};

const PARTS = [
  ["target", "model"],
  ["drafter", "drafter"],
  ["python", "Python"],
  ["waiting", "waiting"],
];

const drawTimes = (element, answer, index) => {
  const round = answer.rounds[index];
  const parts = [
    [`round ${index + 1}`, round.seconds],
    [index ? `rounds 1 to ${index + 1}` : "so far", answer.secondsUntil(index)],
  ];
  const key = html("div", { class: "key" });
  for (const [part, word] of PARTS) {
    if (parts.some(([, seconds]) => seconds[part] > 0)) {
      key.append(html("span", { class: part }, `${word} ${share(parts[1][1], part)}`));
    }
  }
  element.replaceChildren(...parts.flatMap(([name, seconds]) => stack(name, seconds)), key);
};

const share = (seconds, part) => percent(seconds[part] / (total(seconds) || 1));

const stack = (name, seconds) => {
  const all = total(seconds);
  const line = html("div", { class: "stack", role: "img" });
  const words = [];
  for (const [part, word] of PARTS) {
    if (!(seconds[part] > 0)) continue;
    const piece = html("i", { class: part, title: `${word}: ${milliseconds(seconds[part])}` });
    piece.style.width = `${(seconds[part] / all) * 100}%`;
    line.append(piece);
    words.push(`${word} ${milliseconds(seconds[part])}`);
  }
  line.setAttribute("aria-label", `${name}: ${words.join(", ")}`);
  const told = [html("span", {}, name), html("span", {}, milliseconds(all))];
  return [html("div", { class: "label" }, ...told), line];
};
