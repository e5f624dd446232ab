// The rounds of an answer as a tape: a column for each, which a slider's keys move along.

import { svg } from "./dom.js";
import { countDrafts, ownKind } from "./answer.js";

const CELL = { width: 9, gap: 2, least: 5, most: 10 };
const HEIGHT = 64;

export class Tape {
  constructor(element, onChoose) {
    this.element = element;
    this.onChoose = onChoose;
    this.rounds = [];
    this.chosen = -1;
    this.drawn = 0;
    this.deepest = 0;
    element.addEventListener("keydown", (event) => this._key(event));
    element.addEventListener("pointerdown", (event) => {
      const box = this.picture?.getBoundingClientRect();
      if (!box) return;
      const index = Math.floor((event.clientX - box.left) / (CELL.width + CELL.gap));
      if (index >= 0 && index < this.rounds.length) this.onChoose(index);
    });
  }

  // Show these rounds; the array may have grown since.
  draw(rounds, chosen) {
    const grown = this.rounds === rounds;
    const deepest = Math.max(4, ...rounds.slice(grown ? this.drawn : 0).map(height));
    if (!grown || deepest > this.deepest || !this.picture) {
      this.deepest = grown ? Math.max(deepest, this.deepest) : deepest;
      this.rounds = rounds;
      this.drawn = 0;
      const size = { y: 0, width: CELL.width + 2, height: HEIGHT, rx: 3 };
      this.cursor = svg("rect", { class: "cursor", ...size });
      this.picture = svg("svg", { height: HEIGHT, "aria-hidden": "true" }, this.cursor);
      this.element.replaceChildren(this.picture);
    }
    const cell = Math.max(CELL.least, Math.min(CELL.most, HEIGHT / this.deepest)) - 1;
    for (; this.drawn < rounds.length; this.drawn += 1) {
      this.picture.append(column(rounds[this.drawn], this.drawn, cell));
    }
    this.picture.setAttribute("width", rounds.length * (CELL.width + CELL.gap));
    this._mark(chosen);
  }

  _mark(chosen) {
    this.chosen = chosen;
    const round = this.rounds[chosen];
    const left = chosen * (CELL.width + CELL.gap);
    this.cursor.setAttribute("x", left - 1);
    const { element } = this;
    element.setAttribute("aria-valuemax", this.rounds.length);
    element.setAttribute("aria-valuenow", chosen + 1);
    if (round) {
      const place = `Round ${chosen + 1} of ${this.rounds.length}`;
      const words = `${place}: ${round.path.length} of ${countDrafts(round)} drafts kept`;
      element.setAttribute("aria-valuetext", words);
    }
    const room = element.clientWidth - 16;
    if (left < element.scrollLeft || left + CELL.width > element.scrollLeft + room) {
      element.scrollLeft = left - room + 4 * CELL.width;
    }
  }

  _key(event) {
    const last = this.rounds.length - 1;
    const steps = {
      ArrowLeft: this.chosen - 1,
      ArrowDown: this.chosen - 1,
      ArrowRight: this.chosen + 1,
      ArrowUp: this.chosen + 1,
      PageDown: this.chosen - 10,
      PageUp: this.chosen + 10,
      Home: 0,
      End: last,
    };
    if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.onChoose(Math.max(0, Math.min(last, steps[event.key])));
  }
}

const depthOf = (round) =>
  round.nodes.reduce((most, node) => (node.candidate ? Math.max(most, node.depth) : most), 0);

const height = (round) => Math.max(depthOf(round), round.path.length + (round.next_token ? 1 : 0));

// Kept tokens from below, the target's own above them, and the outline of what was drafted higher.
const column = (round, index, cell) => {
  const x = index * (CELL.width + CELL.gap);
  const kinds = round.path.map(() => "kept");
  if (round.next_token) kinds.push(ownKind(round));
  const group = svg("g");
  for (let depth = 0; depth < Math.max(kinds.length, depthOf(round)); depth += 1) {
    const inset = depth < kinds.length ? 0 : 0.5;
    group.append(
      svg("rect", {
        class: kinds[depth] ?? "guess",
        x: x + inset,
        y: HEIGHT - (depth + 1) * (cell + 1) + inset,
        width: CELL.width - 2 * inset,
        height: cell - 2 * inset,
        rx: 1.5,
      }),
    );
  }
  return group;
};
