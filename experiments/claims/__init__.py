"""What the papers claim beside what was found here: pages of the site, the audit, and a quick run again."""
