"""What a model wrote, taken apart into thoughts, content and tool calls."""
