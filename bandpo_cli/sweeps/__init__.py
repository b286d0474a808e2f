"""Many runs: what they are, and how they are run side by side."""
