// What this browser keeps: each conversation under a key of its own, and settings. Tabs share
// both. Which conversation is open, and the API key, are the tab's.

import { conversationOf, isAhead, keptOf, merge, newConversation } from "./conversation.js";

const PREFIX = "specrun.conversation.";
const BEFORE = "specrun.conversations"; // one list of all, as earlier versions kept them
const SETTINGS = "specrun.settings";
const OPEN = "specrun.open";
const FULL =
  "This browser's storage is full: the last changes are in this tab only. Delete conversations " +
  "that you no longer need, or export this one, before you close it.";
const OFF = "This browser keeps nothing for this page: conversations last as long as this tab.";

const storageOf = (name) => {
  try {
    return globalThis[name] ?? null;
  } catch {
    return null; // storage is off
  }
};

const read = (storage, name, otherwise) => {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // storage is off, or holds something else
  }
};

// Write a value; return what is to be said if that fails, else "". What was there before stays.
const write = (storage, name, value) => {
  try {
    storage.setItem(name, JSON.stringify(value));
    return "";
  } catch (problem) {
    return problem?.name === "QuotaExceededError" ? FULL : OFF;
  }
};

const remove = (storage, name) => {
  try {
    storage.removeItem(name);
  } catch {
    // Storage is off: nothing is there.
  }
};

export class Store {
  constructor(local = storageOf("localStorage"), session = storageOf("sessionStorage")) {
    this.local = local;
    this.session = session;
    this.known = new Map(); // conversations by their ids
    this.unsaved = new Set(); // ids of those that have not been written since they changed
    this.problem = ""; // why not
    this._takeOver();
    for (const id of this._keptIds()) this._load(id);
    this.settings = { ...read(local, SETTINGS, {}) };
    this.key = read(session, "specrun.key", "");
  }

  // The conversations that have messages, the one that changed last first.
  get conversations() {
    const all = [...this.known.values()].filter(({ messages }) => messages.length);
    return all.sort((one, other) => other.changed - one.changed);
  }

  // The conversation that was open last, in this tab or in the one before it.
  opened() {
    const own = read(this.session, OPEN, null);
    return this.known.get(own ?? read(this.local, OPEN, "")) ?? newConversation();
  }

  open({ id, messages }) {
    write(this.session, OPEN, id);
    if (messages.length) write(this.local, OPEN, id);
  }

  // Keep a conversation, with what other tabs have made of it meanwhile.
  save(conversation) {
    const { id } = conversation;
    const kept = this._kept(id);
    if (kept) merge(conversation, kept);
    this.known.set(id, conversation);
    this.problem = write(this.local, PREFIX + id, keptOf(conversation));
    if (this.problem) this.unsaved.add(id);
    else this.unsaved.delete(id);
  }

  delete({ id }) {
    this.known.delete(id);
    this.unsaved.delete(id);
    remove(this.local, PREFIX + id);
    this._saveAgain();
  }

  deleteAll() {
    for (const conversation of [...this.known.values()]) this.delete(conversation);
    for (const id of this._keptIds()) remove(this.local, PREFIX + id);
    remove(this.local, BEFORE);
  }

  // Take what another tab has written; return the id of the conversation that changed, null for
  // none, and undefined where all may have.
  take({ key, newValue }) {
    if (key === null) {
      for (const { id } of this.conversations) if (!this.unsaved.has(id)) this.known.delete(id);
      return undefined;
    }
    if (key === SETTINGS) this.settings = { ...read(this.local, SETTINGS, {}) };
    if (!key.startsWith(PREFIX)) return null;
    const id = key.slice(PREFIX.length);
    if (newValue === null) {
      if (!this.unsaved.has(id)) this.known.delete(id);
      this._saveAgain();
      return id;
    }
    this._load(id);
    return id;
  }

  set(name, value) {
    this.settings = { ...this.settings, ...read(this.local, SETTINGS, {}), [name]: value };
    write(this.local, SETTINGS, this.settings);
  }

  setKey(key) {
    this.key = key;
    write(this.session, "specrun.key", key);
  }

  _kept(id) {
    return conversationOf(read(this.local, PREFIX + id, null), id);
  }

  _load(id) {
    const kept = this._kept(id);
    if (!kept) return;
    const own = this.known.get(id);
    if (!own) {
      this.known.set(id, kept);
      return;
    }
    // Two tabs may have written at once: what the later one did not know is written again.
    if (isAhead(merge(own, kept), kept)) this.save(own);
  }

  _saveAgain() {
    for (const id of [...this.unsaved]) this.save(this.known.get(id));
    if (!this.unsaved.size) this.problem = "";
  }

  _keptIds() {
    try {
      return Object.keys(this.local)
        .filter((key) => key.startsWith(PREFIX))
        .map((key) => key.slice(PREFIX.length));
    } catch {
      return [];
    }
  }

  // Give each conversation of the earlier list its own key. Tabs that do so at once do the same.
  _takeOver() {
    const lists = read(this.local, BEFORE, null);
    if (!Array.isArray(lists)) return;
    const failed = lists.filter((list, index) => {
      if (!Array.isArray(list)) return false;
      const id = `before-${index}`;
      const messages = list.map((each, at) => ({ ...each, id: `${id}-${at}`, at }));
      const conversation = conversationOf({ messages, changed: lists.length - index }, id);
      if (!conversation.messages.length) return false;
      this.known.set(id, conversation);
      this.problem = write(this.local, PREFIX + id, keptOf(conversation));
      return this.problem;
    });
    if (!failed.length) remove(this.local, BEFORE);
  }
}
