"""What a run is made of: models, positions, generators; snapshots of them, on disk and on their way to a newcomer."""
