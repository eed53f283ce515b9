"""The tasks that come with Brimful, and how a task is found from what the user typed."""
