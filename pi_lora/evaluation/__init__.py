"""The measurements: each in a folder with its arithmetic, driver, typed result, table and picture."""
