"""The job that Lightning runs: its ranks, state, loaders, samples; what it checks at start, how it ends and resumes."""
