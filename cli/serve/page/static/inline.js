// Text within a block of Markdown: emphasis, code, links. Segments go in, a tree comes out.

import { labelOf } from "./blocks.js";

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MARK = /[\p{P}\p{S}]/u;
const SPECIAL = /[\\`*_~[\]<&]/;
const AUTOLINK = /<([A-Za-z][A-Za-z0-9+.-]{1,31}:[^\s<>]*)>/y;
const MAIL = /<([\w.!#$%&'*+/=?^`{|}~-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*)>/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([A-Za-z][A-Za-z0-9]{1,30}));/y;
const TARGET = /\([ \t\n]*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))/y;
const TARGET_END =
  /(?:[ \t\n]+(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\((?:[^()\\]|\\.)*\)))?[ \t\n]*\)/y;
const OPEN_TARGET = /\([ \t\n]*<?[^\s<>()]*(?:\([^\s()]*\)?[^\s()]*)?(?:[ \t]+"[^"\n]*"?)?$/y;
const LABEL = /\[((?:[^[\]\\]|\\.)*)\]/y;
const ADDRESS = /^(?:https?|mailto):\S/i;
const LOOSE_END = /(?:[*_~`]+|\[|\\|&#?\w{0,10})$/; // may yet become a part of something

const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®",
  trade: "™", hellip: "…", mdash: "—", ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”",
  laquo: "«", raquo: "»", bull: "•", middot: "·", times: "×", divide: "÷", plusmn: "±", deg: "°",
  micro: "µ", para: "¶", sect: "§", euro: "€", pound: "£", yen: "¥", cent: "¢", larr: "←",
  uarr: "↑", rarr: "→", darr: "↓", harr: "↔", rArr: "⇒", ne: "≠", le: "≤", ge: "≥", infin: "∞",
  sum: "∑", prod: "∏", radic: "√", int: "∫", part: "∂", pi: "π", alpha: "α", beta: "β",
  gamma: "γ", delta: "δ", epsilon: "ε", lambda: "λ", mu: "μ", sigma: "σ", theta: "θ", omega: "ω",
  half: "½", frac12: "½", frac14: "¼", frac34: "¾", sup2: "²", sup3: "³", auml: "ä", ouml: "ö",
  uuml: "ü", Auml: "Ä", Ouml: "Ö", Uuml: "Ü", szlig: "ß", eacute: "é", egrave: "è", ccedil: "ç",
};

const match = (pattern, text, place) => {
  pattern.lastIndex = place;
  return pattern.exec(text);
};

// An address that a link may have, as the browser gets it; null for every other scheme.
export const safeAddress = (address) => {
  const plain = address.replace(/\\([!-/:-@[-`{-~])/g, "$1").replaceAll("&amp;", "&");
  return ADDRESS.test(plain) ? plain : null;
};

const KINDS = { 1: "emphasis", 2: "strong" };

class InlineParser {
  constructor(segments, definitions, live) {
    this.segments = [];
    this.text = "";
    for (const { text, at } of segments) {
      const last = this.segments.at(-1);
      if (!last || last.at + this.text.length - last.from !== at) {
        this.segments.push({ from: this.text.length, at });
      }
      this.text += text;
    }
    this.definitions = definitions;
    this.live = live;
    this.place = 0;
    this.out = []; // nodes, and marks that may yet become emphasis or links
    this.noCode = new Set(); // lengths of backticks that close nothing further on
    if (live) this.text = this.text.replace(LOOSE_END, "");
  }

  parse() {
    const { text } = this;
    while (this.place < text.length) {
      const character = text[this.place];
      if (!this._special(character)) {
        let end = this.place + 1;
        while (end < text.length && !SPECIAL.test(text[end])) end += 1;
        this._text(this.place, end);
      }
    }
    return this._paired(this.out);
  }

  // Take what begins with a character that may mean something; false: it is plain text.
  _special(character) {
    switch (character) {
      case "\\":
        return this._escape();
      case "`":
        return this._code();
      case "*":
      case "_":
      case "~":
        return this._mark(character);
      case "[":
        this.out.push({ bracket: true, active: true, from: this.place, to: this.place + 1 });
        this.place += 1;
        return true;
      case "]":
        return this._link();
      case "<":
        return this._autolink();
      case "&":
        return this._entity();
      default:
        return false;
    }
  }

  // Nodes of a part of the text: one for each piece that lies whole in the source.
  _leaves(from, to) {
    const leaves = [];
    this.segments.forEach((segment, index) => {
      const end = this.segments[index + 1]?.from ?? this.text.length;
      const [begin, stop] = [Math.max(from, segment.from), Math.min(to, end)];
      if (begin >= stop) return;
      const at = segment.at + begin - segment.from;
      leaves.push({ type: "text", text: this.text.slice(begin, stop), at });
    });
    return leaves;
  }

  _text(from, to) {
    this.out.push(...this._leaves(from, to));
    this.place = to;
  }

  _escape() {
    const next = this.text[this.place + 1];
    if (next === "\n") {
      this._text(this.place + 1, this.place + 2);
      return true;
    }
    if (!next || !PUNCTUATION.test(next)) return false;
    this._text(this.place + 1, this.place + 2);
    return true;
  }

  _entity() {
    const found = match(ENTITY, this.text, this.place);
    if (!found) return false;
    const [whole, decimal, hex, name] = found;
    const number = decimal ? Number(decimal) : parseInt(hex, 16);
    const isCode = number > 0 && number <= 0x10ffff && !(number >= 0xd800 && number < 0xe000);
    const text = name ? ENTITIES[name] : String.fromCodePoint(isCode ? number : 0xfffd);
    if (text === undefined) return false;
    this.out.push({ ...this._leaves(this.place, this.place + 1)[0], text });
    this.place += whole.length;
    return true;
  }

  _code() {
    const { text, place } = this;
    let begin = place;
    while (text[begin] === "`") begin += 1;
    const length = begin - place;
    let end = this.noCode.has(length) ? -1 : closingTicks(text, begin, length);
    let next = end + length;
    if (end < 0) {
      this.noCode.add(length);
      if (!this.live || begin === text.length) {
        this._text(place, begin);
        return true;
      }
      end = next = text.length;
    }
    const inner = text.slice(begin, end);
    const isPadded = /^[ \n]/.test(inner) && /[ \n]$/.test(inner) && inner.trim();
    const leaves = this._leaves(begin + (isPadded ? 1 : 0), end - (isPadded ? 1 : 0));
    for (const leaf of leaves) leaf.text = leaf.text.replaceAll("\n", " ");
    this.out.push({ type: "code", children: leaves });
    this.place = next;
    return true;
  }

  _mark(character) {
    const { text, place } = this;
    let end = place;
    while (text[end] === character) end += 1;
    const before = characterBefore(text, place);
    const behind = end < text.length ? String.fromCodePoint(text.codePointAt(end)) : " ";
    const [spaceBefore, spaceBehind] = [/\s/u.test(before), /\s/u.test(behind)];
    const [markBefore, markBehind] = [MARK.test(before), MARK.test(behind)];
    const left = !spaceBehind && (!markBehind || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceBehind || markBehind);
    const isInner = character === "_";
    const isOdd = character === "~" && (end - place) % 2 === 1;
    const isClosing = right && !left;
    if (isOdd && !isClosing) this._text(place, place + 1);
    const from = this.place;
    if (isOdd && end - place === 1) {
      this._text(from, end);
      return true;
    }
    const count = end - place - (isOdd ? 1 : 0);
    const mark = {
      mark: character,
      from,
      to: from + count,
      count,
      whole: count,
      opens: left && (!isInner || !right || markBefore),
      closes: right && (!isInner || !left || markBehind),
      isLoose: character !== "*" || count > 1 || spaceBefore || markBefore,
    };
    this.out.push(mark);
    this.place = end;
    if (isOdd && isClosing) this._text(end - 1, end);
    return true;
  }

  // The nodes of items: each mark closes what it can, innermost first.
  _paired(items) {
    const out = [];
    for (const item of items) {
      if (item.closes) this._pair(out, item);
      if (item.count !== 0) out.push(item);
    }
    if (this.live) this._closeAll(out);
    return this._literal(out);
  }

  _pair(out, closer) {
    for (let index = out.length - 1; index >= 0 && closer.count; index -= 1) {
      const opener = out[index];
      if (opener.mark !== closer.mark || !opener.opens || !fits(opener, closer)) continue;
      const used = closer.mark === "~" || Math.min(opener.count, closer.count) > 1 ? 2 : 1;
      const type = closer.mark === "~" ? "strike" : KINDS[used];
      out.push({ type, children: this._literal(out.splice(index + 1)) });
      opener.count -= used;
      opener.to -= used;
      closer.count -= used;
      closer.from += used;
      if (!opener.count) out.splice(index, 1);
      else index += 1;
    }
  }

  // What is open closes at the end while more is to come.
  _closeAll(out) {
    for (let place = out.length - 2; place >= 0; place -= 1) {
      const { mark, opens, isLoose, count } = out[place];
      if (!mark || !opens || !isLoose) continue;
      const type = mark === "~" ? "strike" : KINDS[Math.min(count, 2)];
      out.splice(place, Infinity, { type, children: this._literal(out.slice(place + 1)) });
    }
  }

  // Marks that came to nothing are text again.
  _literal(items) {
    return items.flatMap((item) => {
      if (item.type) return [item];
      return this.live && this._isLink(item) ? [] : this._leaves(item.from, item.to);
    });
  }

  // Whether a bracket that is open yet looks as if its link's address were to come.
  _isLink({ bracket, from }) {
    return bracket && /[\p{L}`*_]/u.test(this.text[from + 1] ?? "");
  }

  _link() {
    const index = this.out.findLastIndex((item) => item.bracket);
    const opener = this.out[index];
    if (!opener) return false;
    const begin = this.place;
    if (this.live && begin === this.text.length - 1 && this._isLink(opener)) {
      this.place += 1;
      return true;
    }
    opener.bracket = false;
    const target = opener.active ? this._target(opener) : null;
    if (!target) {
      this._text(begin, begin + 1);
      return true;
    }
    const children = this._paired(this.out.splice(index + 1));
    this.out.pop();
    if (target.href === null) this.out.push(...children);
    else {
      this.out.push({ type: "link", href: target.href, children });
      for (const item of this.out) if (item.bracket) item.active = false; // no link in a link
    }
    this.place = target.end;
    return true;
  }

  // The address behind a "]", and where it ends; null: there is none that a link may have.
  _target(opener) {
    const { text } = this;
    const behind = this.place + 1;
    const found = text[behind] === "(" ? match(TARGET, text, behind) : null;
    if (found) {
      const end = match(TARGET_END, text, behind + found[0].length);
      if (end) {
        const href = safeAddress(found[1] ?? found[2]);
        return href && { href, end: behind + found[0].length + end[0].length };
      }
      if (this.live && match(OPEN_TARGET, text, behind)) return { href: null, end: text.length };
    }
    const own = text.slice(opener.to, this.place);
    const label = match(LABEL, text, behind);
    const known = this.definitions.get(labelOf(label?.[1] || own));
    const href = known === undefined ? null : safeAddress(known);
    return href && { href, end: behind + (label?.[0].length ?? 0) };
  }

  _autolink() {
    const found = match(AUTOLINK, this.text, this.place);
    const mail = found ? null : match(MAIL, this.text, this.place);
    const [whole, shown] = found ?? mail ?? [];
    const href = whole && safeAddress(found ? shown : `mailto:${shown}`);
    if (!href) return false;
    const begin = this.place + 1;
    this.out.push({ type: "link", href, children: this._leaves(begin, begin + shown.length) });
    this.place += whole.length;
    return true;
  }
}

const closingTicks = (text, begin, length) => {
  for (let place = text.indexOf("`", begin); place >= 0; place = text.indexOf("`", place)) {
    const from = place;
    while (text[place] === "`") place += 1;
    if (place - from === length) return from;
  }
  return -1;
};

const characterBefore = (text, place) => {
  if (!place) return " ";
  const low = text.charCodeAt(place - 1);
  return low >= 0xdc00 && low < 0xe000 ? text.slice(place - 2, place) : text[place - 1];
};

// CommonMark's rule of three: marks that could both open and close pair by their lengths.
const fits = (opener, closer) => {
  if (closer.mark === "~" || !(opener.closes || closer.opens)) return true;
  const isThree = (opener.whole + closer.whole) % 3 === 0;
  return !isThree || (opener.whole % 3 === 0 && closer.whole % 3 === 0);
};

// Nodes of a text that is given in segments { text, at }:
// { type: "text", text, at } and { type: code, strong, emphasis, strike or link, children }.
export const parseInline = (segments, definitions, live) =>
  new InlineParser(segments, definitions, live).parse();
