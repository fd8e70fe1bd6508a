"""The places of pictures and captions: folders, tars, tables, here or in object storage."""
