"""Import path of `read_stored_run` for `bandpo_cli.cli.run_sync`."""

from bandpo_cli.storage.run_record import read_stored_run as read_stored_run
