"""Bad input ends with one clear line and exit code 2; nothing has been created or changed.

Every case names the command and what its message must contain: the value that is wrong and,
where there is one, the way out.
"""
