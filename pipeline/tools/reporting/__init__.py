"""Pages and pictures made from what the stages leave behind."""
