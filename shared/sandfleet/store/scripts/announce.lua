-- Register an incarnation of a node and take its lease.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 lease ms  4 again 0|1  5 data id of a lease that may be taken over, or ''
--       6… field value pairs of the node
-- Returns {now ms, 'ok' | 'in_use' | 'retired', holder}
--@use time route story line blanks
local ms = now_ms()
local key, lease = P .. 'node:' .. A[1], P .. 'lease:' .. A[1]
local holder = call('GET', lease)
local n = call('HMGET', key, 'incarnation', 'state', 'retired', 'data_id')
-- Whoever takes over knows that the holder's process has ended: it holds the lock of the node's id on that data root.
if holder and holder ~= A[2] and (A[5] == '' or A[5] ~= n[4]) then return { ms, 'in_use', holder } end
if n[3] == A[2] then return { ms, 'retired' } end
local same = n[1] == A[2] and n[2] ~= 'gone'
call('HSET', key, 'incarnation', A[2], unpack(A, 6))
if not same then
  drop_blanks(A[1])
  call('HSET', key, 'state', 'ready', 'started', ms)
  call('HDEL', key, 'load', 'reason', 'returning')
  -- Until it has closed the earlier one, that one's sandboxes may yet be its own (see `thread_state`).
  if A[5] ~= '' and A[5] == n[4] then call('HSET', key, 'returning', A[2]) end
  story(A[1], ms, 'announced', text('incarnation', A[2]))
end
call('PEXPIRE', key, DAY)
call('SET', lease, A[2], 'PX', A[3])
call('SADD', P .. 'nodes', A[1])
call('PEXPIRE', P .. 'nodes', KEEP)
local fleet = P .. 'fleet'
local longest = math.max(tonumber(A[3]), tonumber(call('HGET', fleet, 'lease') or 0))
call('HSETNX', fleet, 'since', ms)
call('HSET', fleet, 'lease', longest)
-- It was announced before and nobody knows it: data was lost, and others hold sandboxes that are not known yet.
if A[4] == '1' and not n[1] then call('HSET', fleet, 'recovering', ms + longest) end
call('PEXPIRE', fleet, KEEP)
kick(ms)
return { ms, 'ok' }
