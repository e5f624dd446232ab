// An answer as it comes: its text, its tokens by origin, and the traces of its rounds.

const MOST_ROUNDS = 4000;

// "drafted": a guess that was kept; "corrected": the target's own, in place of a rejected guess;
// "bonus": the target's own where no guess was rejected.
export const ownKind = (round) => (round.recovered ? "corrected" : "bonus");

export const countDrafts = (round) => round.nodes.filter((node) => node.candidate).length;

export const keptTokens = (round) => {
  const kept = round.path.map((node) => ({ text: round.nodes[node].text, kind: "drafted" }));
  const own = round.next_token;
  if (own) kept.push({ text: own.text, kind: ownKind(round) });
  return kept;
};

export class Answer {
  constructor() {
    this.text = "";
    this.thoughts = "";
    this.pieces = []; // { text, kind, round }, which together are `text`
    this.rounds = [];
    this.finish = null;
    this.usage = null;
    this.timings = null;
    this.began = performance.now();
    this.seconds = 0;
    this._waiting = []; // tokens of traces whose text is yet to come
  }

  // Take a chunk of the stream; return the pieces of text that are new.
  take(chunk) {
    for (const round of tracesOf(chunk)) {
      const index = this.rounds.length;
      if (index < MOST_ROUNDS) this.rounds.push(round);
      this._waiting.push(...keptTokens(round).map((token) => ({ ...token, round: index })));
    }
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) this.timings = chunk.timings;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (choice.delta?.reasoning_content) {
      this.thoughts += choice.delta.reasoning_content;
      this._waiting = []; // thoughts are not coloured
    }
    const text = choice.delta?.content ?? "";
    this.seconds = (performance.now() - this.began) / 1000;
    if (!text) return [];
    const pieces = this._spell(text);
    this.text += text;
    this.pieces.push(...pieces);
    return pieces;
  }

  // Part a text into tokens. What a stop text or an incomplete character held back comes with a
  // later token, so text that no token spells belongs to the token that released it.
  _spell(text) {
    const pieces = [];
    let rest = text;
    while (rest && this._waiting.length) {
      const token = this._waiting[0];
      if (!token.text || !rest.startsWith(token.text)) break;
      pieces.push({ ...token });
      rest = rest.slice(token.text.length);
      this._waiting.shift();
    }
    if (rest) {
      const last = this._waiting.at(-1) ?? { kind: "plain", round: null };
      pieces.push({ text: rest, kind: last.kind, round: last.round });
      this._waiting = [];
    }
    return pieces;
  }

  get tokensPerRound() {
    return this.rounds.at(-1)?.tokens_per_round ?? null;
  }

  // Seconds in each part, of all rounds up to and with one.
  secondsUntil(index) {
    const sum = { target: 0, drafter: 0, python: 0, waiting: 0 };
    for (const round of this.rounds.slice(0, index + 1)) {
      for (const part of Object.keys(sum)) sum[part] += round.seconds[part] ?? 0;
    }
    return sum;
  }
}

// A slow reader gets several rounds in a chunk; the last chunk says how many there were.
const tracesOf = (chunk) => (Array.isArray(chunk.specrun?.rounds) ? chunk.specrun.rounds : []);

// Whether acceptance came to a node: its parent was kept, and did not end the answer.
export const isReached = (round, parent) => {
  if (parent >= 0 && !round.path.includes(parent)) return false;
  return round.next_token !== null || parent !== (round.path.at(-1) ?? -1);
};
