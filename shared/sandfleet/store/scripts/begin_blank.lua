-- Take a place for a blank sandbox that its node is about to start.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 slot  4 expires ms  5 places that must be left free
-- Returns 1, or 0 when nothing was done.
--@use time
local ms = now_ms()
local node, places = A[1], P .. 'places:' .. A[1]
local n = call('HMGET', P .. 'node:' .. node, 'state', 'incarnation', 'replicas')
if n[1] ~= 'ready' or n[2] ~= A[2] or call('GET', P .. 'lease:' .. node) ~= A[2] then return 0 end
-- A free place belongs to those who stand in line.
if call('EXISTS', P .. 'parked') == 1 then return 0 end
if tonumber(n[3]) - call('ZCOUNT', places, '(' .. ms, '+inf') - 1 < tonumber(A[5]) then return 0 end
if call('ZADD', places, 'NX', ms + tonumber(A[4]), '~' .. A[3]) == 0 then return 0 end
keep(places, KEEP)
return 1
