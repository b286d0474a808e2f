"""The Band in other trainers: one module per trainer, imported where that trainer is installed.

The modules need the trainer and `bandpo_cli.bounds`, and nothing else of this package (docs/integrations.md).
"""
