// A text of Markdown as elements: blocks that have not changed stay as they are while more comes.

import { parseMarkdown } from "./blocks.js";
import { html } from "./dom.js";
import { highlight } from "./highlight.js";

// Draws a text that grows into a container. `pieces` of an answer, which together are the text,
// become spans of their own: a token can be seen, and clicked, wherever Markdown has put it.
export class Prose {
  constructor(container, pieces = []) {
    this.container = container;
    this.pieces = pieces;
    this.starts = []; // where each of the pieces begins in the text
    this.length = 0;
    this.drawn = []; // what each block was drawn from
  }

  draw(text, live = false) {
    for (const { text: piece } of this.pieces.slice(this.starts.length)) {
      this.starts.push(this.length);
      this.length += piece.length;
    }
    const blocks = parseMarkdown(text, live);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.drawn[same]) same += 1;
    while (this.container.children.length > same) this.container.lastChild.remove();
    this.container.append(...blocks.slice(same).map((block) => this._block(block)));
    this.drawn = keys;
  }

  _block(block, isTight = false) {
    switch (block.type) {
      case "heading":
        return html(`h${Math.min(6, block.level + 2)}`, {}, ...this._inlines(block.children));
      case "rule":
        return html("hr");
      case "code":
        return this._code(block);
      case "quote":
        return html("blockquote", {}, ...block.blocks.map((each) => this._block(each)));
      case "list":
        return this._list(block);
      case "table":
        return this._table(block);
      default:
        return html(isTight ? "span" : "p", {}, ...this._inlines(block.children));
    }
  }

  _list({ start, tight, items }) {
    const list = start === null ? html("ul") : html("ol", { start: start === 1 ? null : start });
    for (const { blocks } of items) {
      list.append(html("li", {}, ...blocks.map((each) => this._block(each, tight))));
    }
    return list;
  }

  _table({ aligns, head, rows }) {
    const row = (cells, name, scope) => {
      const drawn = cells.map((cell, index) =>
        html(name, { scope, class: aligns[index] }, ...this._inlines(cell)),
      );
      return html("tr", {}, ...drawn);
    };
    const body = html("tbody", {}, ...rows.map((cells) => row(cells, "td", null)));
    const table = html("table", {}, html("thead", {}, row(head, "th", "col")), body);
    const frame = { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" };
    return html("div", frame, table);
  }

  _code({ language, lines }) {
    const code = lines.map(({ text }) => `${text}\n`).join("");
    const drawn = html("code");
    let [index, within] = [0, 0];
    for (const { text, kind } of highlight(code, language)) {
      let rest = text;
      while (rest) {
        const line = lines[index];
        const part = rest.slice(0, line.text.length + 1 - within);
        drawn.append(...this._spans(part, line.at + within, kind && `code-${kind}`));
        within += part.length;
        rest = rest.slice(part.length);
        if (within > line.text.length) [index, within] = [index + 1, 0];
      }
    }
    const copy = html("button", { type: "button", class: "quiet" }, "Copy code");
    copy.hidden = !navigator.clipboard; // which pages have that were not loaded over https
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.replace(/\n$/, ""));
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy code"; }, 2000);
    });
    const name = html("figcaption", {}, html("span", {}, language), copy);
    return html("figure", { class: "code" }, name, html("pre", { tabindex: "0" }, drawn));
  }

  _inlines(nodes) {
    return nodes.flatMap((node) => {
      if (node.type === "text") return this._spans(node.text, node.at, null);
      const children = this._inlines(node.children);
      if (node.type === "link") return [link(node.href, children)];
      return [html(ELEMENTS[node.type], {}, ...children)];
    });
  }

  // A text of the source as nodes, parted where its tokens are.
  _spans(text, at, kind) {
    const coloured = (part) => (kind ? html("span", { class: kind }, part) : part);
    if (!this.starts.length) return [coloured(text)];
    const nodes = [];
    let index = this._pieceAt(at);
    for (let place = 0; place < text.length; index += 1) {
      const end = Math.max(place + 1, (this.starts[index + 1] ?? Infinity) - at);
      const part = text.slice(place, end);
      const { kind: origin, round } = this.pieces[index];
      nodes.push(html("span", { class: `token ${origin}`, "data-round": round }, coloured(part)));
      place += part.length;
    }
    return nodes;
  }

  // The last piece that begins at a place of the text or before it.
  _pieceAt(at) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

const ELEMENTS = { code: "code", strong: "strong", emphasis: "em", strike: "s" };

const link = (href, children) => {
  const safe = { href, title: href, target: "_blank", rel: "noopener noreferrer" };
  return html("a", safe, ...children);
};
