"""Pictures of runs, drawn from their records."""
