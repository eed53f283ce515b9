"""The built-in language tasks, and how a task is loaded from what the user typed."""
