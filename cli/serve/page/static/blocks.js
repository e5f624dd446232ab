// Blocks of Markdown as CommonMark parts them, and tables. HTML and images stay text. No element
// is made here: lines go in, a tree comes out. Every text knows its place in the source.

import { parseInline } from "./inline.js";

const DEEPEST = 20; // containers in each other; what is deeper is a paragraph

const ATX = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const FENCE = /^( {0,3})(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const MARKER = /^( {0,3})(?:([-+*])|(\d{1,9})([.)]))(?=[ \t]|$)/;
const SETEXT = /^ {0,3}(=+|-+)[ \t]*$/;
const DELIMITERS = /^ {0,3}[|:-][-|: \t]*$/;
const DEFINITION =
  /^ {0,3}\[((?:[^[\]\\]|\\.)+)\]:[ \t]*(?:<([^<>]*)>|(\S+))(?:[ \t]+(?:"[^"]*"|'[^']*'))?[ \t]*$/;

// The end of a text that may yet become the begin of something else: it is shown a moment later.
const UNDECIDED =
  /^[\s>]*(?:[-+*][ \t]+)?(?:`+|~+|#{1,6}|[-+*_=][-*_= \t]*|\d{1,3}[.)]?[ \t]*|\|?[-|: \t]*)$/;

const isBlank = (line) => !line.text.trim();

// Columns of the white space that a line begins with.
const indentOf = ({ text }) => {
  let column = 0;
  for (const character of text) {
    if (character === " ") column += 1;
    else if (character === "\t") column += 4 - (column % 4);
    else break;
  }
  return column;
};

// A line without so many columns of white space at its begin.
const cut = ({ text, at }, columns) => {
  let [column, place] = [0, 0];
  while (column < columns && (text[place] === " " || text[place] === "\t")) {
    column += text[place] === " " ? 1 : 4 - (column % 4);
    place += 1;
  }
  const over = Math.max(0, column - columns);
  return { text: " ".repeat(over) + text.slice(place), at: at + place - over };
};

const after = ({ text, at }, length) => ({ text: text.slice(length), at: at + length });

// Whether a line begins a block. `inside`: it would end a paragraph of the same container.
const beginsBlock = ({ text }, inside) => {
  if (ATX.test(text) || FENCE.test(text) || RULE.test(text) || QUOTE.test(text)) return true;
  const marker = MARKER.exec(text);
  if (!marker) return false;
  if (!inside) return true;
  return (marker[3] === undefined || Number(marker[3]) === 1) && text.length > marker[0].length
    && Boolean(text.slice(marker[0].length).trim());
};

const endsInParagraph = (blocks) => {
  const last = blocks.at(-1);
  if (last?.type === "quote") return endsInParagraph(last.blocks);
  if (last?.type === "list") return endsInParagraph(last.items.at(-1).blocks);
  return last?.type === "paragraph";
};

class BlockParser {
  constructor(lines, context, depth) {
    this.lines = lines;
    this.context = context; // { definitions, live }
    this.depth = depth;
    this.next = 0;
    this.hasGap = false; // a blank line between two blocks
  }

  get line() {
    return this.lines[this.next];
  }

  parse() {
    const blocks = [];
    let gap = false;
    while (this.next < this.lines.length) {
      if (isBlank(this.line)) {
        gap = blocks.length > 0;
        this.next += 1;
        continue;
      }
      const first = this.next;
      const block = this._block();
      if (!block) continue;
      this.hasGap ||= gap;
      gap = false;
      blocks.push({ ...block, first, end: this.next });
    }
    return blocks;
  }

  _block() {
    const { line } = this;
    if (indentOf(line) >= 4) return this._indented();
    const { text } = line;
    const fence = FENCE.exec(text);
    if (fence) return this._fenced(fence);
    const heading = ATX.exec(text);
    if (heading) return this._heading(heading);
    if (RULE.test(text)) {
      this.next += 1;
      return { type: "rule" };
    }
    if (this.depth < DEEPEST) {
      if (QUOTE.test(text)) return this._quote();
      if (MARKER.test(text)) return this._list();
    }
    return this._table() ?? this._paragraph();
  }

  _indented() {
    const lines = [];
    for (; this.next < this.lines.length; this.next += 1) {
      if (!isBlank(this.line) && indentOf(this.line) < 4) break;
      lines.push(cut(this.line, 4));
    }
    while (isBlank(lines.at(-1))) {
      lines.pop();
      this.next -= 1;
    }
    return { type: "code", language: "", lines };
  }

  _fenced([, indent, ticks, tickInfo, tildes, tildeInfo]) {
    const mark = ticks ?? tildes;
    const [language] = (tickInfo ?? tildeInfo).trim().split(/\s/, 1);
    const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
    const lines = [];
    for (this.next += 1; this.next < this.lines.length; this.next += 1) {
      if (end.test(this.line.text)) {
        this.next += 1;
        break;
      }
      lines.push(cut(this.line, indent.length));
    }
    return { type: "code", language, lines };
  }

  _heading([opening, marks]) {
    const line = after(this.line, opening.length);
    line.text = line.text.replace(/(?:^|[ \t]+)#+[ \t]*$/, "").trimEnd();
    this.next += 1;
    return { type: "heading", level: marks.length, lines: [line] };
  }

  _quote() {
    const lines = [];
    for (; this.next < this.lines.length; this.next += 1) {
      const mark = QUOTE.exec(this.line.text);
      if (mark) lines.push(after(this.line, mark[0].length));
      else if (this._isLazy(lines)) lines.push({ ...this.line, lazy: true });
      else break;
    }
    return { type: "quote", blocks: this._within(lines).parse() };
  }

  // Whether the line goes on with a paragraph of a container that it is not marked as part of.
  _isLazy(lines) {
    if (isBlank(this.line) || isBlank(lines.at(-1)) || beginsBlock(this.line, false)) return false;
    return lines.at(-1).lazy || endsInParagraph(this._within(lines, true).parse());
  }

  _within(lines, onTrial = false) {
    const context = onTrial ? { ...this.context, definitions: new Map() } : this.context;
    return new BlockParser(lines, context, this.depth + 1);
  }

  _list() {
    const kindOf = (line) => {
      const marker = MARKER.exec(line?.text ?? "");
      return marker && !RULE.test(line.text) ? marker[2] ?? marker[4] : null;
    };
    const kind = kindOf(this.line);
    const number = MARKER.exec(this.line.text)[3];
    const items = [];
    let tight = true;
    for (;;) {
      const inner = this._within(this._itemLines());
      items.push({ blocks: inner.parse() });
      tight &&= !inner.hasGap;
      let next = this.next;
      while (next < this.lines.length && isBlank(this.lines[next])) next += 1;
      if (kindOf(this.lines[next]) !== kind) break;
      tight &&= next === this.next;
      this.next = next;
    }
    const start = number === undefined ? null : Number(number);
    return { type: "list", start, tight, items };
  }

  _itemLines() {
    const [marker] = MARKER.exec(this.line.text);
    const rest = after(this.line, marker.length);
    const indent = indentOf(rest);
    const room = isBlank(rest) || indent > 4 ? 1 : indent;
    const width = marker.length + room;
    const lines = [cut(rest, room)];
    let blanks = [];
    for (this.next += 1; this.next < this.lines.length; this.next += 1) {
      const { line } = this;
      if (isBlank(line)) {
        if (lines.length === 1 && isBlank(lines[0])) break;
        blanks.push({ text: "", at: line.at });
      } else if (indentOf(line) >= width) {
        lines.push(...blanks, cut(line, width));
        blanks = [];
      } else if (!blanks.length && this._isLazy(lines)) {
        lines.push({ ...line, lazy: true });
      } else break;
    }
    this.next -= blanks.length;
    return lines;
  }

  _table() {
    const head = this.line;
    if (!head.text.includes("|")) return null;
    const delimiters = this.lines[this.next + 1];
    const headCells = cellsOf(head);
    // A table is one from its first line on while it comes, if it begins as tables do.
    const isBegun = !delimiters && this.context.live && /^ {0,3}\|/.test(head.text);
    const aligns = isBegun ? headCells.map(() => null) : alignsOf(delimiters);
    if (aligns?.length !== headCells.length) return null;
    this.next += isBegun ? 1 : 2;
    const rows = [];
    for (; this.next < this.lines.length; this.next += 1) {
      const { line } = this;
      if (isBlank(line) || indentOf(line) >= 4 || beginsBlock(line, false)) break;
      const cells = cellsOf(line);
      while (cells.length < aligns.length) cells.push([]);
      rows.push(cells);
    }
    return { type: "table", aligns, head: headCells, rows };
  }

  _paragraph() {
    const first = this.next;
    let level = 0;
    for (this.next += 1; this.next < this.lines.length && !level; this.next += 1) {
      const { line } = this;
      if (isBlank(line)) break;
      const setext = line.lazy ? null : SETEXT.exec(line.text);
      if (setext) level = setext[1][0] === "=" ? 1 : 2;
      else if (beginsBlock(line, true) || (indentOf(line) < 4 && this._isTable())) break;
    }
    const lines = this.lines.slice(first, level ? this.next - 1 : this.next);
    while (lines.length && this._define(lines[0])) lines.shift();
    if (!lines.length) return null;
    return level ? { type: "heading", level, lines } : { type: "paragraph", lines };
  }

  _isTable() {
    const aligns = alignsOf(this.lines[this.next + 1]);
    if (!aligns || !this.line.text.includes("|")) return false;
    return cellsOf(this.line).length === aligns.length;
  }

  _define({ text }) {
    const found = DEFINITION.exec(text);
    if (!found) return false;
    const label = labelOf(found[1]);
    const { definitions } = this.context;
    if (!definitions.has(label)) definitions.set(label, found[2] ?? found[3]);
    return true;
  }
}

export const labelOf = (text) => text.trim().replace(/\s+/g, " ").toLowerCase();

const alignsOf = (line) => {
  if (!line || line.lazy || !DELIMITERS.test(line.text)) return null;
  const cells = cellsOf(line).map((cell) => cell.map(({ text }) => text).join(""));
  if (!cells.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return cells.map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return cell.startsWith(":") ? "left" : null;
  });
};

// The cells of a row, each in segments: the backslash of an escaped bar is left out.
const cellsOf = ({ text, at }) => {
  const cells = [[]];
  let begin = 0;
  const close = (end) => {
    if (end > begin) cells.at(-1).push({ text: text.slice(begin, end), at: at + begin });
  };
  for (let place = 0; place < text.length; place += 1) {
    if (text[place] === "\\" && text[place + 1] === "|") {
      close(place);
      begin = place + 1;
      place += 1;
    } else if (text[place] === "|") {
      close(place);
      begin = place + 1;
      cells.push([]);
    }
  }
  close(text.length);
  const trimmed = cells.map(trimCell);
  if (!trimmed[0].length) trimmed.shift();
  if (trimmed.length && !trimmed.at(-1).length) trimmed.pop();
  return trimmed;
};

const trimCell = (segments) => {
  const cell = [...segments];
  while (cell.length && isBlank(cell[0])) cell.shift();
  while (cell.length && isBlank(cell.at(-1))) cell.pop();
  if (!cell.length) return cell;
  cell[0] = after(cell[0], cell[0].text.length - cell[0].text.trimStart().length);
  cell[cell.length - 1] = { ...cell.at(-1), text: cell.at(-1).text.trimEnd() };
  return cell;
};

const linesOf = (source) => {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text: text.replace(/\r$/, ""), at };
    at += text.length + 1;
    return line;
  });
};

// Lines as segments of one text: what ends all but the last is part of it.
const joined = (lines) =>
  lines.map(({ text, at }, index) => ({ text: index < lines.length - 1 ? `${text}\n` : text, at }));

const withInlines = (block, definitions, live) => {
  const inline = (segments) => parseInline(segments, definitions, live);
  const all = (blocks, isLive) =>
    blocks.map((each, index) =>
      withInlines(each, definitions, isLive && index === blocks.length - 1),
    );
  switch (block.type) {
    case "paragraph":
    case "heading":
      return { ...block, children: inline(joined(block.lines)) };
    case "quote":
      return { ...block, blocks: all(block.blocks, live) };
    case "list":
      return {
        ...block,
        items: block.items.map((item, index) => ({
          blocks: all(item.blocks, live && index === block.items.length - 1),
        })),
      };
    case "table":
      return {
        ...block,
        head: block.head.map(inline),
        rows: block.rows.map((row) => row.map(inline)),
      };
    default:
      return block;
  }
};

// The blocks of a source: { type, first, end, ... }, where the numbers are its lines. `live`: more
// is to come, and what is still open counts as if it were closed.
export const parseMarkdown = (source, live = false) => {
  const lines = linesOf(source);
  if (live && UNDECIDED.test(lines.at(-1).text)) lines.pop();
  else if (lines.at(-1).text === "") lines.pop();
  const definitions = new Map();
  const blocks = new BlockParser(lines, { definitions, live }, 0).parse();
  const tail = live ? blocks.length - 1 : -1;
  return blocks.map((block, index) => withInlines(block, definitions, index === tail));
};
