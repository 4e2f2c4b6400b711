"""Other people's trainers, by their own extension points. Each is an extra, and is imported by its full name."""
