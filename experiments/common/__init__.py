"""What the experiments of all papers share: results as files, their record, command lines, measured runs."""
