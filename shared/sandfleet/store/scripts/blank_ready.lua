-- A blank sandbox lives: a thread may have it.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 slot  4 digest of its spec  5 again 0|1: take its place anew
-- Returns 1, or 0 when it has no place (any more).
--@use time line
local ms = now_ms()
local node, places, blanks = A[1], P .. 'places:' .. A[1], P .. 'blanks:' .. A[1]
local n = call('HMGET', P .. 'node:' .. node, 'state', 'incarnation')
if n[2] ~= A[2] or n[1] == 'gone' then return 0 end
if A[5] ~= '1' and tonumber(call('ZSCORE', places, '~' .. A[3]) or 0) <= ms then return 0 end
call('ZADD', places, '+inf', '~' .. A[3])
call('HSET', blanks, A[3], A[4])
keep(places, KEEP)
keep(blanks, KEEP)
kick(ms)
return 1
