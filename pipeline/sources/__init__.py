"""Where pictures and captions come from: folders, tars, tables, here or in object storage."""
