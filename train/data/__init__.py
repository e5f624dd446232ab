"""Training data: files of texts and chats, token ids with loss masks, the target's own answers."""
