// Why the rounds of an answer are not there, or hold no drafts; and what would fill them.

import { countDrafts } from "./answer.js";

const CHOOSE = "Choose another drafter above, and ask again.";
const START =
  "Start the server with a drafter: --drafter auto, --drafter prompt-lookup, or -md with a small " +
  "model or a head that was made for this model.";

const isNone = (drafter) => drafter === "none";

// `offered` is what the server says of drafting (see /props), `chosen` the drafter of requests, ""
// for the server's. Returns "" where rounds with drafts can be seen, or are about to be.
export const reasonOf = ({ answer, hasOldAnswer, offered, chosen }) => {
  const drafter = chosen || offered?.drafter || "";
  const others = (offered?.drafters ?? []).filter((each) => !isNone(each));
  const remedy = others.length ? CHOOSE : START;
  if (!answer) {
    if (isNone(drafter)) {
      const whose = chosen ? "The chosen drafter is none" : "This server has no drafter";
      return `${whose}, so the model makes each token alone. ${remedy}`;
    }
    if (hasOldAnswer) {
      return "The rounds of an answer are not kept. Answer again, and they appear here.";
    }
    return "";
  }
  if (!answer.rounds.length) {
    if (!answer.done) return "";
    return "The server told no rounds of this answer: there are none where it ended at once.";
  }
  if (!answer.done && answer.rounds.length < 8) return "";
  if (answer.rounds.some(countDrafts)) return "";
  const used = [...new Set(answer.rounds.map((round) => round.drafter))];
  if (!used.every(isNone)) {
    return (
      `Nothing was drafted: ${used.join(", ")} found no tokens to guess here. Lookups guess what ` +
      `repeats the text so far; a small model or a head guesses everywhere. ${remedy}`
    );
  }
  if (isNone(drafter) || !drafter) {
    return `Nothing was drafted: the drafter of this answer is none. ${remedy}`;
  }
  return (
    `Nothing was drafted: ${drafter} measured that the model alone is faster here. ` +
    "A drafter that is right more often, or cheaper, would fill this view."
  );
};
