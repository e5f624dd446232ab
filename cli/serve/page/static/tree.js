// The draft tree of a round, as SVG: what is kept reads along its first line.

import { percent, shown, svg } from "./dom.js";
import { isReached, ownKind } from "./answer.js";

export const ROOT = -1;
export const OWN = "own"; // the target's own token, below the end of the path

const fateOf = (round, id, kept) => {
  if (kept.has(id)) return "kept";
  return isReached(round, round.nodes[id].parent) ? "rejected" : "unreached";
};

// Places of all nodes: { id, parent, depth, line, kind, text, p, q }, parents before children.
export const placed = (round) => {
  const kept = new Set(round.path);
  const end = round.path.at(-1) ?? ROOT;
  const below = new Map();
  round.nodes.forEach((node, id) => {
    if (!node.candidate) return;
    if (!below.has(node.parent)) below.set(node.parent, []);
    below.get(node.parent).push(id);
  });
  const places = [];
  let lines = 0;
  const visit = (place) => {
    places.push(place);
    const children = (below.get(place.id) ?? []).map((id) => ({
      id,
      parent: place.id,
      depth: place.depth + 1,
      kind: fateOf(round, id, kept),
      text: round.nodes[id].text,
      p: round.greedy ? round.nodes[id].model : round.nodes[id].target,
      q: round.nodes[id].draft,
    }));
    children.sort((one, other) => (other.kind === "kept") - (one.kind === "kept"));
    if (place.id === end && round.next_token) {
      const law = round.laws.find((each) => each.node === end);
      const best = law?.model.find((each) => each.token === round.next_token.token);
      children.unshift({
        id: OWN,
        parent: end,
        depth: place.depth + 1,
        kind: ownKind(round),
        text: round.next_token.text,
        p: round.greedy ? best?.probability ?? null : round.next_token.probability,
        q: null,
      });
    }
    children.forEach((child, index) => {
      if (index) lines += 1;
      child.line = index ? lines : place.line;
      visit(child);
    });
  };
  visit({ id: ROOT, parent: null, depth: 0, line: 0, kind: "root", text: "", p: null, q: null });
  return { places, depth: Math.max(...places.map((place) => place.depth)), lines: lines + 1 };
};

const FATES = {
  root: "the last token before this round",
  kept: "drafted and kept",
  rejected: "drafted and rejected",
  unreached: "drafted, below what was not kept",
  corrected: "the model's own, in place of a rejected draft",
  bonus: "the model's own",
};

const description = (place) => {
  if (place.kind === "root") return `Root: ${FATES.root}`;
  const parts = [`${shown(place.text)}: ${FATES[place.kind]}`, `depth ${place.depth}`];
  if (place.p !== null) parts.push(`model ${percent(place.p)}`);
  if (place.q !== null) parts.push(`drafter ${percent(place.q)}`);
  return parts.join(", ");
};

const BOX = { height: 36, least: 58, most: 112, gap: 22, row: 43, margin: 14 };

export class TreeView {
  // `onShow` is told the place that is pointed at or focused, null when none is.
  constructor(container, onShow) {
    this.container = container;
    this.onShow = onShow;
    this.groups = new Map();
  }

  // Draw a round's tree, which grows within about so many milliseconds; 0: it is there at once.
  draw(round, rootText, growth) {
    const layout = placed(round);
    const room = this.container.clientWidth || 560;
    const across = room >= 460; // else the tree grows downwards, as on a phone
    this.keys = across
      ? { child: "ArrowRight", parent: "ArrowLeft", next: "ArrowDown", last: "ArrowUp" }
      : { child: "ArrowDown", parent: "ArrowUp", next: "ArrowRight", last: "ArrowLeft" };
    const pitch = across ? BOX.row : BOX.row + 10; // edges need room where they go down
    const columns = across ? layout.depth + 1 : layout.lines;
    const fair = (room - 2 * BOX.margin + BOX.gap) / columns - BOX.gap;
    const width = Math.max(BOX.least, Math.min(BOX.most, fair));
    const at = (place) => {
      const [column, row] = across ? [place.depth, place.line] : [place.line, place.depth];
      return { x: BOX.margin + column * (width + BOX.gap), y: BOX.margin + row * pitch };
    };
    const rows = across ? layout.lines : layout.depth + 1;
    const size = {
      width: 2 * BOX.margin + columns * (width + BOX.gap) - BOX.gap,
      height: 2 * BOX.margin + rows * pitch - (pitch - BOX.height),
    };
    const picture = svg("svg", {
      ...size,
      viewBox: `0 0 ${size.width} ${size.height}`,
      role: "tree",
      "aria-label": "Draft tree: arrow keys move between its tokens",
      class: growth ? "grows" : null,
    });
    this.places = new Map(layout.places.map((place) => [place.id, place]));
    this.groups.clear();
    const edges = svg("g", { "aria-hidden": "true" });
    picture.append(edges);
    for (const place of layout.places) {
      if (place.parent !== null) {
        const line = edge(at(this.places.get(place.parent)), at(place), place, width, across);
        edges.append(grown(line, place.depth / (layout.depth + 1), growth));
      }
      const { x, y } = at(place);
      const group = node(place, width, place.kind === "root" ? rootText : place.text);
      this.groups.set(place.id, grown(group, place.depth / (layout.depth + 1), growth));
      // What grows is moved by its style, which replaces an attribute: the place is an outer one's.
      picture.append(svg("g", { transform: `translate(${x} ${y})`, role: "none" }, group));
      group.addEventListener("pointerenter", () => this.show(place.id));
      group.addEventListener("focus", () => this.show(place.id));
      group.addEventListener("click", () => this.show(place.id));
      group.addEventListener("keydown", (event) => this._move(event, place));
    }
    const first = this.groups.get(ROOT);
    first.setAttribute("tabindex", "0");
    picture.addEventListener("pointerleave", () => this.show(null));
    picture.addEventListener("focusout", (event) => {
      if (!picture.contains(event.relatedTarget)) this.show(null);
    });
    this.container.replaceChildren(picture);
    this.container.scrollTo(0, 0);
  }

  show(id) {
    for (const [other, group] of this.groups) group.classList.toggle("shown", other === id);
    this.onShow(id === null ? null : this.places.get(id));
  }

  _move(event, place) {
    const target = this._neighbour(event.key, place);
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.groups.get(place.id).setAttribute("tabindex", "-1");
    const group = this.groups.get(target);
    group.setAttribute("tabindex", "0");
    group.focus();
  }

  _neighbour(key, place) {
    const all = [...this.places.values()];
    const siblings = all.filter((each) => each.depth === place.depth);
    const index = siblings.indexOf(place);
    const keys = this.keys;
    if (key === keys.child) return all.find((each) => each.parent === place.id)?.id;
    if (key === keys.parent) return place.parent ?? undefined;
    if (key === keys.next) return siblings[index + 1]?.id;
    if (key === keys.last) return siblings[index - 1]?.id;
    if (key === "Home") return ROOT;
    return undefined;
  }
}

// Let an element come when a share of the growth is over. Styles set by script are not inline.
const grown = (element, share, growth) => {
  element.style.animationDelay = `${growth * share * 0.6}ms`;
  element.style.animationDuration = `${growth * 0.4}ms`;
  return element;
};

const edge = (from, to, place, width, across) => {
  const [half, middle] = [BOX.height / 2, width / 2];
  const start = across ? [from.x + width, from.y + half] : [from.x + middle, from.y + BOX.height];
  const end = across ? [to.x, to.y + half] : [to.x + middle, to.y];
  const bend = across ? (end[0] - start[0]) / 2 : (end[1] - start[1]) / 2;
  const [first, second] = across
    ? [[start[0] + bend, start[1]], [end[0] - bend, end[1]]]
    : [[start[0], start[1] + bend], [end[0], end[1] - bend]];
  const path = `M${start} C${first} ${second} ${end}`;
  return svg("path", { d: path, class: `edge ${place.kind}` });
};

const node = (place, width, text) => {
  const label = shown(text, Math.floor((width - 12) / 7.6));
  const group = svg(
    "g",
    {
      class: `node ${place.kind}`,
      tabindex: "-1",
      role: "treeitem",
      "aria-level": place.depth + 1,
      "aria-label": description(place),
    },
    svg("rect", { class: "box", width, height: BOX.height, rx: 8 }),
    svg("text", { x: width / 2, y: place.p === null ? 22.5 : 17 }, label),
  );
  const track = width - 16;
  [["p", place.p, 24], ["q", place.q, 29]].forEach(([kind, share, top]) => {
    if (share === null) return;
    const line = { x: 8, y: top, height: 3, rx: 1 };
    group.append(
      svg("rect", { class: "slot", ...line, width: track }),
      svg("rect", { class: kind, ...line, width: Math.max(1, track * share) }),
    );
  });
  return group;
};
