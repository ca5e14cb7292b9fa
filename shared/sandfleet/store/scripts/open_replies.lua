-- Make sure a client's reply stream exists and lives on.
-- KEYS  1 prefix
-- ARGV  1 client  2 ttl ms
-- Returns 1 if it had to be made.
local key = P .. 'reply:' .. A[1]
local made = 0
if call('EXISTS', key) == 0 then
  call('XDEL', key, call('XADD', key, '*', 'op', ''))
  made = 1
end
call('PEXPIRE', key, A[2])
return made
