// What this browser keeps: conversations and settings. The key is kept by its tab alone.

const read = (storage, name, otherwise) => {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // storage is off, or holds something else
  }
};

const write = (storage, name, value) => {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // Storage is off or full: the page works without.
  }
};

const MOST_CONVERSATIONS = 50;

const isMessage = (message) =>
  ["user", "assistant"].includes(message?.role) && typeof message.content === "string";

export class Store {
  constructor() {
    const kept = read(localStorage, "specrun.conversations", []);
    this.conversations = (Array.isArray(kept) ? kept : [])
      .map((messages) => (Array.isArray(messages) ? messages.filter(isMessage) : []))
      .filter((messages) => messages.length)
      .map((messages) => ({ messages }));
    this.settings = { ...read(localStorage, "specrun.settings", {}) };
    this.key = read(sessionStorage, "specrun.key", "");
    this.conversations.unshift({ messages: [] });
  }

  save() {
    const texts = this.conversations
      .filter(({ messages }) => messages.length)
      .slice(0, MOST_CONVERSATIONS)
      .map(({ messages }) => messages.map(({ role, content }) => ({ role, content })));
    write(localStorage, "specrun.conversations", texts);
  }

  set(name, value) {
    this.settings[name] = value;
    write(localStorage, "specrun.settings", this.settings);
  }

  setKey(key) {
    this.key = key;
    write(sessionStorage, "specrun.key", key);
  }

  // Return an empty conversation, the first one if that is empty.
  begin() {
    if (this.conversations[0].messages.length) this.conversations.unshift({ messages: [] });
    return this.conversations[0];
  }

  forgetAll() {
    this.conversations = [{ messages: [] }];
    this.save();
  }
}

export const titleOf = (conversation) => {
  const [first] = conversation.messages;
  if (!first) return "New conversation";
  const line = first.content.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
};
