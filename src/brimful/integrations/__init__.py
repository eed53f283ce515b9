"""The exact step inside other people's trainers, each adopted in a few changed lines."""
