// Reads texts of Markdown as a JSON list, and prints the list of their HTML.

import { readFileSync } from "node:fs";
import { parseMarkdown } from "./blocks.js";

const escaped = (text) =>
  text
    .replace(/&/g, "&amp;")
    .replace(/</g, "&lt;")
    .replace(/>/g, "&gt;")
    .replace(/"/g, "&quot;");

const NAMES = { code: "code", strong: "strong", emphasis: "em", strike: "s" };

const inlines = (nodes) =>
  nodes
    .map(({ type, text, href, children }) => {
      if (type === "text") return escaped(text);
      if (type === "link") return `<a href="${escaped(href)}">${inlines(children)}</a>`;
      return `<${NAMES[type]}>${inlines(children)}</${NAMES[type]}>`;
    })
    .join("");

const table = ({ aligns, head, rows }) => {
  const row = (cells, name) => {
    const drawn = cells.map((cell, index) => {
      const align = aligns[index] ? ` style="text-align:${aligns[index]}"` : "";
      return `<${name}${align}>${inlines(cell)}</${name}>`;
    });
    return `<tr>${drawn.join("")}</tr>`;
  };
  const body = rows.map((cells) => row(cells, "td")).join("");
  const drawn = body && `<tbody>${body}</tbody>`;
  return `<table><thead>${row(head, "th")}</thead>${drawn}</table>`;
};

const list = ({ start, tight, items }) => {
  const name = start === null ? "ul" : "ol";
  const first = start === null || start === 1 ? "" : ` start="${start}"`;
  const drawn = items.map((item) => `<li>${blocks(item.blocks, tight)}</li>`);
  return `<${name}${first}>${drawn.join("")}</${name}>`;
};

const code = ({ language, lines }) => {
  const kind = language ? ` class="language-${escaped(language)}"` : "";
  const text = escaped(lines.map((line) => `${line.text}\n`).join(""));
  return `<pre><code${kind}>${text}</code></pre>`;
};

const block = (each, isTight) => {
  if (each.type === "paragraph" && isTight) return inlines(each.children);
  if (each.type === "paragraph") return `<p>${inlines(each.children)}</p>`;
  if (each.type === "heading") return `<h${each.level}>${inlines(each.children)}</h${each.level}>`;
  if (each.type === "quote") return `<blockquote>${blocks(each.blocks)}</blockquote>`;
  return { rule: () => "<hr />", code, list, table }[each.type](each);
};

const blocks = (all, isTight = false) => all.map((each) => block(each, isTight)).join("");

const texts = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => blocks(parseMarkdown(text)))));
