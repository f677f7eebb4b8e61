"""What runs an algorithm: executors, rounds, evaluation, and resuming from what lies on disk."""
