"""Train a user's own module under a plan: `parallelize` puts the plan on it, `ParallelModule` takes the steps, saves and resumes."""
