"""What a run is made of: models, positions, generators; snapshots of them, on disk and sent to a newcomer."""
