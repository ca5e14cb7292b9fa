-- Push a node's lease.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 lease ms  4 load JSON or ''
-- Returns {now ms, 'ok' | 'unknown' | 'lost', state}
--@use time line
local ms = now_ms()
local key, lease = P .. 'node:' .. A[1], P .. 'lease:' .. A[1]
local holder = call('GET', lease)
if holder and holder ~= A[2] then return { ms, 'lost' } end
local n = call('HMGET', key, 'incarnation', 'state', 'retired')
if not n[1] then return { ms, 'unknown' } end
if n[1] ~= A[2] or n[3] == A[2] or n[2] == 'gone' then return { ms, 'lost' } end
call('PEXPIRE', key, DAY)
call('SET', lease, A[2], 'PX', A[3])
if A[4] ~= '' then call('HSET', key, 'load', A[4]) end
call('PEXPIRE', P .. 'nodes', KEEP)
call('PEXPIRE', P .. 'fleet', KEEP)
call('PEXPIRE', P .. 'places:' .. A[1], KEEP)
call('PEXPIRE', P .. 'warm:' .. A[1], KEEP)
call('PEXPIRE', P .. 'blanks:' .. A[1], KEEP)
call('PEXPIRE', P .. 'inflight:' .. A[1], 2 * DAY)
-- It was away, and so were its places.
if not holder then kick(ms) end
return { ms, 'ok', n[2] }
