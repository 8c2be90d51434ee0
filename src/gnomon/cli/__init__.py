"""The command line: serve, chat, generate, verify, explain, env."""
