"""Programs of the repository: data, plots and checks that are not part of the package."""
