// Markdown while it comes: what is drawn of its beginnings, and where each text lies in the source.

import assert from "node:assert/strict";
import { test } from "node:test";
import { parseMarkdown } from "./blocks.js";
import { highlight } from "./highlight.js";
import { safeAddress } from "./inline.js";

const TEXT = `# Title

A **bold** word, a [link](https://a.b/c) and \`code\`.

1. one
   - *two*

| a | b |
|---|--:|
| 1 | \`x\` |

> quoted

\`\`\`python
def f(): pass  # \`\`
\`\`\`

The end.
`;

// Every text of a tree, wherever it is: { text, at }.
const leaves = (tree) => {
  if (Array.isArray(tree)) return tree.flatMap(leaves);
  if (tree === null || typeof tree !== "object") return [];
  if (typeof tree.text === "string") return [tree];
  const { lines, ...others } = tree;
  return leaves(tree.type === "code" && lines ? lines : Object.values(others));
};
const shown = (blocks) => leaves(blocks).map(({ text }) => text).join("");
const types = (blocks) => blocks.map(({ type }) => type);

test("each text lies in the source where it says", () => {
  const all = leaves(parseMarkdown(TEXT));
  assert.ok(all.length > 15);
  for (const { text, at } of all) assert.equal(TEXT.slice(at, at + text.length), text);
});

test("blocks keep their kind from their first character on, and no mark is seen", () => {
  const final = types(parseMarkdown(TEXT));
  assert.deepEqual(
    final,
    ["heading", "paragraph", "list", "table", "quote", "code", "paragraph"],
  );
  for (let end = 1; end <= TEXT.length; end += 1) {
    const blocks = parseMarkdown(TEXT.slice(0, end), true);
    assert.deepEqual(types(blocks), final.slice(0, blocks.length), JSON.stringify(TEXT.slice(0, end)));
    const prose = shown(blocks.filter(({ type }) => type !== "code"));
    assert.doesNotMatch(prose, /[*`#|[\]]|--/, JSON.stringify(TEXT.slice(0, end)));
  }
});

test("what has been shown of a text stays", () => {
  let before = "";
  for (let end = 1; end <= TEXT.length; end += 1) {
    const now = shown(parseMarkdown(TEXT.slice(0, end), true));
    assert.ok(now.startsWith(before.trimEnd()), JSON.stringify([before, now]));
    before = now;
  }
});

test("what turns out to be no mark is text in the end", () => {
  for (const text of ["2 ** 3 and **", "`open", "[x](http://a", "a & b &am", "| a | b |", "1", "-"]) {
    const live = shown(parseMarkdown(text, true));
    const whole = shown(parseMarkdown(text));
    if (!["| a | b |", "-"].includes(text)) assert.equal(whole, text);
    assert.ok(live.length <= whole.length);
  }
  assert.deepEqual(types(parseMarkdown("| a | b |")), ["paragraph"]);
  assert.deepEqual(types(parseMarkdown("| a | b |", true)), ["table"]);
});

test("links lead to pages and mail alone", () => {
  for (const good of ["http://a", "HTTPS://a.b/c?d=e", "mailto:a@b.c"]) {
    assert.equal(safeAddress(good), good);
  }
  const bad = ["javascript:alert(1)", "data:text/html,x", "file:///x", "//a.b", "/a", "vbscript:x"];
  for (const address of [...bad, "java\nscript:x", " javascript:x", "\u0001javascript:x"]) {
    assert.equal(safeAddress(address), null);
    const text = `[x](${address})`;
    assert.ok(!JSON.stringify(parseMarkdown(text)).includes('"link"'), text);
  }
});

test("pieces of coloured code spell it", () => {
  const code = 'def f(x): # a "b"\n  return """c\nd""" + 0x1f\n';
  const pieces = highlight(code, "py");
  assert.equal(pieces.map(({ text }) => text).join(""), code);
  const kinds = new Map(pieces.map(({ text, kind }) => [text, kind]));
  assert.equal(kinds.get("def"), "keyword");
  assert.equal(kinds.get('# a "b"'), "comment");
  assert.equal(kinds.get('"""c\nd"""'), "string");
  assert.equal(kinds.get("0x1f"), "number");
  for (const language of ["", "js", "c", "rust", "json", "html", "diff", "sql", "constructor"]) {
    const text = "<a b='c'> 'x /* y \"\"\" `z\n+ 1e5 -- d";
    assert.equal(highlight(text, language).map((piece) => piece.text).join(""), text);
  }
});
