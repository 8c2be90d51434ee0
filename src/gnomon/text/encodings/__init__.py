"""How each family writes a conversation: messages to segments, never to re-read text."""
