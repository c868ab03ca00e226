"""``mxq report``: what runs say as one page, as Markdown, or as one number per line."""
