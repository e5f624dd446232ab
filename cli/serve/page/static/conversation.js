// A conversation: its messages by their ids, so that what several tabs make of it can be merged.
//
// { id, changed, dead, messages }, a message { id, role, content, at, version } and, of some,
// { to, thoughts, files, partial }: the question, what was thought, and that the end is missing.
// A message is never moved. What is deleted is named in `dead`, and never comes back.

const ROLES = ["user", "assistant"];

export const newId = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return [...bytes].map((byte) => byte.toString(36).padStart(2, "0")).join("");
};

export const newConversation = (id = newId()) => ({ id, changed: 0, dead: [], messages: [] });

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);

const fileOf = ({ name, text } = {}) => (isText(name) && isText(text) ? { name, text } : null);

const messageOf = (kept) => {
  if (!kept || !isText(kept.id) || !ROLES.includes(kept.role) || !isText(kept.content)) return null;
  const message = { id: kept.id, role: kept.role, content: kept.content };
  message.at = isNumber(kept.at) ? kept.at : 0;
  message.version = isNumber(kept.version) ? kept.version : 0;
  if (isText(kept.to)) message.to = kept.to;
  if (isText(kept.thoughts)) message.thoughts = kept.thoughts;
  const files = Array.isArray(kept.files) ? kept.files.map(fileOf).filter(Boolean) : [];
  if (files.length) message.files = files;
  if (kept.partial) message.partial = true;
  return message;
};

// A conversation as it was kept, whatever somebody has put there; null: it is none.
export const conversationOf = (kept, id) => {
  if (!Array.isArray(kept?.messages)) return null;
  const dead = Array.isArray(kept.dead) ? kept.dead.filter(isText) : [];
  const messages = kept.messages.map(messageOf).filter(Boolean);
  const changed = isNumber(kept.changed) ? kept.changed : 0;
  return inOrder({ id, changed, dead, messages });
};

// What is kept of it: nothing that only this tab can use.
export const keptOf = ({ changed, dead, messages }) => {
  const isSaid = ({ role, content, thoughts }) => role === "user" || content || thoughts;
  return { changed, dead, messages: messages.filter(isSaid).map(messageOf) };
};

// Each answer stands behind its question, whenever it was made.
const inOrder = (conversation) => {
  const times = new Map(conversation.messages.map(({ id, at }) => [id, at]));
  const dead = new Set(conversation.dead);
  const place = (message) => [times.get(message.to) ?? message.at, message.at];
  conversation.messages = conversation.messages
    .filter(({ id }) => !dead.has(id))
    .map((message) => ({ message, place: place(message) }))
    .sort((one, other) => one.place[0] - other.place[0] || one.place[1] - other.place[1])
    .map(({ message }) => message);
  return conversation;
};

// Take into a conversation what another tab has made of it: nothing is lost but what is deleted.
export const merge = (own, other) => {
  const messages = new Map(own.messages.map((message) => [message.id, message]));
  for (const message of other.messages) {
    const known = messages.get(message.id);
    if (!known || message.version > known.version) messages.set(message.id, message);
  }
  own.dead = [...new Set([...own.dead, ...other.dead])];
  own.changed = Math.max(own.changed, other.changed);
  own.messages = [...messages.values()];
  return inOrder(own);
};

// Whether a conversation has something that another state of it lacks.
export const isAhead = (own, other) => {
  const known = new Map(other.messages.map(({ id, version }) => [id, version]));
  return (
    own.messages.some(({ id, version }) => !((known.get(id) ?? -1) >= version)) ||
    own.messages.length !== other.messages.length ||
    own.dead.some((id) => !other.dead.includes(id))
  );
};

// Add a message at the end; `fields` may name the question that it answers.
export const addMessage = (conversation, role, content, fields = {}) => {
  const last = Math.max(0, ...conversation.messages.map(({ at }) => at));
  const at = Math.max(Date.now(), last + 1);
  const message = { id: newId(), role, content, at, version: 1, ...fields };
  conversation.messages.push(message);
  conversation.changed = at;
  return message;
};

// Change a message in place.
export const changeMessage = (conversation, message, fields) => {
  Object.assign(message, fields);
  message.version += 1;
  conversation.changed = Math.max(conversation.changed + 1, Date.now());
};

// Delete a message; `andRest`: with all that follows.
export const deleteMessage = (conversation, message, andRest = false) => {
  const place = conversation.messages.indexOf(message);
  if (place < 0) return;
  const gone = conversation.messages.splice(place, andRest ? Infinity : 1);
  conversation.dead.push(...gone.map(({ id }) => id));
  conversation.changed = Math.max(conversation.changed + 1, Date.now());
};

export const titleOf = ({ messages: [first] }) => {
  if (!first) return "New conversation";
  const name = first.content.trim() || first.files?.[0]?.name || "";
  const [line] = name.split("\n", 1);
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
};

// -- what is sent and exported --------------------------------------------------------------------

const fenceFor = (text) => {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  return "`".repeat(longest + 1);
};

// A message as the model gets it: attached files are text behind what was written.
export const sentContent = ({ content, files = [] }) => {
  const attached = files.map(({ name, text }) => {
    const fence = fenceFor(text);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [content, ...attached].filter(Boolean).join("\n\n");
};

export const asJson = (conversation, model) => {
  const messages = conversation.messages.map((message) => {
    const said = { role: message.role, content: sentContent(message) };
    return message.thoughts ? { ...said, reasoning_content: message.thoughts } : said;
  });
  return `${JSON.stringify({ title: titleOf(conversation), model, messages }, null, 2)}\n`;
};

export const asMarkdown = (conversation, model) => {
  const parts = [`# ${titleOf(conversation)}`];
  for (const message of conversation.messages) {
    parts.push(message.role === "user" ? "## You" : `## ${model || "Answer"}`);
    if (message.thoughts) parts.push(message.thoughts.trim().replace(/^/gm, "> "));
    parts.push(sentContent(message).trim());
  }
  return `${parts.join("\n\n")}\n`;
};
