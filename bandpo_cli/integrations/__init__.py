"""The Band in other trainers. Each module needs numpy and the packages of its trainer, and imports no settings."""
