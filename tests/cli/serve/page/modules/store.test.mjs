// Conversations in storage that tabs share: nothing that one of them wrote is lost.

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  addMessage,
  asJson,
  asMarkdown,
  changeMessage,
  deleteMessage,
  newConversation,
  sentContent,
  titleOf,
} from "./conversation.js";
import { textOf } from "./attachments.js";
import { Store } from "./store.js";

// A browser's storage: `room` is how many characters fit in.
const makeStorage = (room = Infinity) => {
  const kept = Object.create({
    getItem: (key) => kept[key] ?? null,
    removeItem: (key) => delete kept[key],
    setItem: (key, value) => {
      const others = Object.keys(kept).filter((each) => each !== key);
      const size = others.reduce((sum, each) => sum + kept[each].length, value.length);
      if (size > Object.getPrototypeOf(kept).room) {
        throw Object.assign(new Error("full"), { name: "QuotaExceededError" });
      }
      kept[key] = String(value);
    },
    room,
  });
  return kept;
};

const KEY = "specrun.conversation.";
const texts = ({ messages }) => messages.map(({ content }) => content);
const tell = (store, id, storage) =>
  store.take({ key: KEY + id, newValue: storage.getItem(KEY + id) });

test("tabs that each have a conversation leave the others' alone", () => {
  const local = makeStorage();
  const tabs = [0, 1, 2].map(() => new Store(local, makeStorage()));
  tabs.forEach((tab, index) => {
    const own = newConversation();
    addMessage(own, "user", `from tab ${index}`);
    tab.save(own);
  });
  const all = new Store(local, makeStorage()).conversations.map(titleOf).sort();
  assert.deepEqual(all, ["from tab 0", "from tab 1", "from tab 2"]);
});

test("three tabs in one conversation keep what each of them adds", () => {
  const local = makeStorage();
  const first = new Store(local, makeStorage());
  const own = newConversation();
  addMessage(own, "user", "begin");
  first.save(own);
  const tabs = [first, ...[1, 2].map(() => new Store(local, makeStorage()))];
  tabs.forEach((tab, index) => {
    const talk = tab.known.get(own.id);
    const question = addMessage(talk, "user", `q${index}`, { at: 10 ** 15 + index });
    addMessage(talk, "assistant", `a${index}`, { to: question.id });
    tab.save(talk);
  });
  const wanted = ["begin", "q0", "a0", "q1", "a1", "q2", "a2"];
  assert.deepEqual(texts(new Store(local, makeStorage()).known.get(own.id)), wanted);
  for (const tab of tabs) tell(tab, own.id, local);
  for (const tab of tabs) assert.deepEqual(texts(tab.known.get(own.id)), wanted);
});

test("what was written over by a tab that did not know it is written again", () => {
  const local = makeStorage();
  const [one, other] = [0, 1].map(() => new Store(local, makeStorage()));
  const talk = newConversation();
  addMessage(talk, "user", "mine");
  one.save(talk);
  const before = local.getItem(KEY + talk.id).replaceAll("mine", "theirs");
  local.setItem(KEY + talk.id, before.replace(/"id":"[^"]*"/, '"id":"other"'));
  assert.equal(tell(one, talk.id, local), talk.id);
  tell(other, talk.id, local);
  assert.deepEqual(texts(other.known.get(talk.id)).sort(), ["mine", "theirs"]);
});

test("what one tab deletes does not come back from another", () => {
  const local = makeStorage();
  const one = new Store(local, makeStorage());
  const talk = newConversation();
  const [first] = ["a", "b", "c"].map((text) => addMessage(talk, "user", text));
  one.save(talk);
  const other = new Store(local, makeStorage());
  deleteMessage(talk, first);
  one.save(talk);
  const theirs = other.known.get(talk.id);
  addMessage(theirs, "user", "d");
  other.save(theirs);
  tell(one, talk.id, local);
  assert.deepEqual(texts(talk), ["b", "c", "d"]);
  one.delete(talk);
  tell(other, talk.id, local);
  assert.equal(other.known.size, 0);
});

test("an answer that grows is the one with the highest version", () => {
  const local = makeStorage();
  const one = new Store(local, makeStorage());
  const talk = newConversation();
  const question = addMessage(talk, "user", "q");
  const answer = addMessage(talk, "assistant", "", { to: question.id, partial: true });
  one.save(talk);
  const other = new Store(local, makeStorage());
  assert.deepEqual(texts(other.known.get(talk.id)), ["q"]);
  changeMessage(talk, answer, { content: "half" });
  one.save(talk);
  tell(other, talk.id, local);
  changeMessage(talk, answer, { content: "half and whole", partial: undefined });
  one.save(talk);
  other.save(other.known.get(talk.id));
  const kept = new Store(local, makeStorage()).known.get(talk.id);
  assert.deepEqual(texts(kept), ["q", "half and whole"]);
  assert.equal("partial" in kept.messages[1], false);
});

test("full storage is said, loses nothing, and is tried again", () => {
  const local = makeStorage(1500);
  const store = new Store(local, makeStorage());
  const [small, large] = [newConversation(), newConversation()];
  addMessage(small, "user", "x".repeat(700));
  store.save(small);
  assert.equal(store.problem, "");
  addMessage(large, "user", "y".repeat(900));
  store.save(large);
  assert.match(store.problem, /^This browser's storage is full: .*\.$/);
  assert.equal(store.conversations.length, 2);
  assert.ok(local.getItem(KEY + small.id));
  addMessage(small, "user", "z".repeat(900));
  store.save(small);
  assert.deepEqual([...store.unsaved].sort(), [small.id, large.id].sort());
  assert.equal(new Store(local, makeStorage()).known.get(small.id).messages.length, 1);
  store.delete(small);
  assert.equal(store.problem, "");
  assert.ok(local.getItem(KEY + large.id));
  const off = new Store(null, null);
  off.save(large);
  assert.match(off.problem, /keeps nothing/);
  assert.equal(off.conversations.length, 1);
});

test("the conversation that was open last opens, in its tab and in the next", () => {
  const [local, session] = [makeStorage(), makeStorage()];
  const store = new Store(local, session);
  const [one, two] = [newConversation(), newConversation()];
  for (const talk of [one, two]) {
    addMessage(talk, "user", talk.id);
    store.save(talk);
  }
  store.open(one);
  assert.equal(new Store(local, session).opened().id, one.id);
  assert.equal(new Store(local, makeStorage()).opened().id, one.id);
  store.open(newConversation());
  assert.equal(new Store(local, session).opened().messages.length, 0);
});

test("conversations of earlier versions, and nonsense, are read", () => {
  const local = makeStorage();
  const lists = [[{ role: "user", content: "old" }, { role: "assistant", content: "yes" }], 7, [{}]];
  local.setItem("specrun.conversations", JSON.stringify(lists));
  local.setItem(`${KEY}bad`, "{");
  local.setItem(`${KEY}worse`, JSON.stringify({ messages: [null, 3, { role: "x" }] }));
  const store = new Store(local, makeStorage());
  assert.deepEqual(store.conversations.map(texts), [["old", "yes"]]);
  assert.equal(local.getItem("specrun.conversations"), null);
  assert.deepEqual(new Store(local, makeStorage()).conversations.map(texts), [["old", "yes"]]);
});

test("files are sent as text, and exports have all that was said", () => {
  const talk = newConversation();
  const files = [{ name: "a.md", text: "x\n```\ny\n```\n" }];
  const question = addMessage(talk, "user", "Read.", { files });
  addMessage(talk, "assistant", "Done.", { to: question.id, thoughts: "one\ntwo" });
  const sent = "Read.\n\nFile a.md:\n````\nx\n```\ny\n```\n````";
  assert.equal(sentContent(question), sent);
  assert.deepEqual(JSON.parse(asJson(talk, "m")), {
    title: "Read.",
    model: "m",
    messages: [
      { role: "user", content: sent },
      { role: "assistant", content: "Done.", reasoning_content: "one\ntwo" },
    ],
  });
  const wanted = `# Read.\n\n## You\n\n${sent}\n\n## m\n\n> one\n> two\n\nDone.\n`;
  assert.equal(asMarkdown(talk, "m"), wanted);
  const bytes = (text) => new TextEncoder().encode(text);
  assert.equal(textOf("a", bytes("b\r\nc")), "b\nc");
  assert.throws(() => textOf("a", { byteLength: 2 ** 19 }), /^Error: a has 512 KiB: .* 256 KiB\.$/);
  for (const bad of [new Uint8Array([255, 254]), bytes("a\0b"), bytes(" ")]) {
    assert.throws(() => textOf("a", bad), /^Error: a is /);
  }
});
