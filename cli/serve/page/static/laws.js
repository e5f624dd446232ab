// Two laws side by side: what the target says after a token, and what the drafter said there.

import { bar, html, percent, shown } from "./dom.js";
import { isReached, ownKind } from "./answer.js";
import { OWN, ROOT } from "./tree.js";

// Where a token was decided: after its parent, and for the target's own after the path.
const placeOf = (round, place) => {
  if (place === null) {
    const last = round.path.at(-1);
    if (round.next_token) return { after: last ?? ROOT, about: round.next_token.token };
    return { after: round.nodes[last].parent, about: round.nodes[last].token };
  }
  if (place.id === ROOT) return { after: ROOT, about: null };
  const token = place.id === OWN ? round.next_token.token : round.nodes[place.id].token;
  return { after: place.parent, about: token };
};

const rowsOf = (round, after) => {
  const law = round.laws.find((each) => each.node === after);
  if (!law) return [];
  const rows = new Map();
  const row = (token, text) => {
    if (!rows.has(token)) rows.set(token, { token, text, p: null, q: null, fate: "" });
    return rows.get(token);
  };
  const target = round.greedy ? law.model : law.target;
  for (const each of target) row(each.token, each.text).p = each.probability;
  for (const each of law.draft) row(each.token, each.text).q = each.probability;
  const kept = new Set(round.path);
  round.nodes.forEach((node, id) => {
    if (node.parent !== after || !node.candidate) return;
    const found = row(node.token, node.text);
    found.p = round.greedy ? node.model : node.target;
    found.q = node.draft;
    const lost = isReached(round, after) ? "rejected" : "unreached";
    found.fate = kept.has(id) ? "kept" : lost;
  });
  const end = round.path.at(-1) ?? ROOT;
  if (round.next_token && after === end) {
    const found = row(round.next_token.token, round.next_token.text);
    found.p ??= round.next_token.probability;
    found.fate = ownKind(round);
  }
  return [...rows.values()].sort((one, other) => (other.p ?? 0) - (one.p ?? 0)).slice(0, 9);
};

const WORDS = {
  kept: "kept",
  rejected: "rejected",
  unreached: "not reached",
  corrected: "the model's",
  bonus: "the model's",
};

export const drawLaw = (container, note, round, place, rootText) => {
  const { after, about } = placeOf(round, place);
  const before = after === ROOT ? rootText : round.nodes[after].text;
  note.textContent = `after “${shown(before, 18)}”`;
  const rows = rowsOf(round, after);
  const drawn = rows.some((row) => row.q !== null);
  const body = html("tbody");
  for (const row of rows) {
    const bars = html("td", {}, bar("p", row.p));
    if (drawn) bars.append(bar("q", row.q));
    const numbers = drawn ? `${percent(row.p)} / ${percent(row.q)}` : percent(row.p);
    body.append(
      html(
        "tr",
        { class: [row.fate, row.token === about ? "about" : ""].join(" ").trim() || null },
        html("td", { class: "name", title: row.text }, shown(row.text)),
        bars,
        html("td", { class: "number" }, numbers),
        html("td", { class: "fate" }, WORDS[row.fate] ?? ""),
      ),
    );
  }
  const caption = html("caption", { class: "unseen" }, "Probabilities of the likeliest tokens");
  const head = html(
    "thead",
    { class: "unseen" },
    html("tr", {}, ...["Token", "Bars", drawn ? "Model / drafter" : "Model", "Outcome"].map(
      (text) => html("th", { scope: "col" }, text),
    )),
  );
  const key = html("div", { class: "key" }, html("span", { class: "p" }, modelWords(round)));
  key.append(
    drawn
      ? html("span", { class: "q" }, "drafter's distribution")
      : document.createTextNode(drafterWords(round, after)),
  );
  container.replaceChildren(html("table", {}, caption, head, body), key);
};

const modelWords = (round) =>
  round.greedy
    ? "model, before temperature 0 takes the likeliest"
    : "model's distribution, as sampled";

const drafterWords = (round, after) =>
  round.nodes.some((node) => node.parent === after && node.candidate)
    ? "These drafts were proposed without a distribution."
    : "Nothing was drafted here.";
