-- Cordon, drain or open a node; one that is gone has given up its lease and its incarnation.
-- KEYS  1 prefix
-- ARGV  1 node  2 state  3 incarnation that must be the current one, or ''  4 reason or ''
--       5 ms for which the holder's lease lasts from now on, or 0
-- Returns 1, or 0 if there is no such node (a retired one comes back by announcing only).
--@use time story line blanks
local ms = now_ms()
local key = P .. 'node:' .. A[1]
local n = call('HMGET', key, 'state', 'incarnation')
local state = n[1]
if not state or state == 'gone' or (A[3] ~= '' and A[3] ~= n[2]) then return 0 end
if state == 'away' and A[2] ~= 'away' and A[2] ~= 'gone' then return 0 end
local lease = P .. 'lease:' .. A[1]
if A[2] == 'gone' then
  call('DEL', lease)
  call('HSET', key, 'retired', n[2])
  drop_blanks(A[1])
end
if A[2] == 'away' then drop_blanks(A[1]) end
if A[5] ~= '0' and call('GET', lease) == n[2] then call('PEXPIRE', lease, A[5]) end
-- A reason belongs to the state it was told with.
if A[2] == 'ready' or (state ~= A[2] and A[4] == '') then
  call('HDEL', key, 'reason')
elseif A[4] ~= '' then
  call('HSET', key, 'reason', A[4])
end
if state ~= A[2] then
  call('HSET', key, 'state', A[2])
  story(A[1], ms, 'state', text('state', A[2]) .. (A[4] ~= '' and text('reason', A[4]) or ''))
  if A[2] == 'ready' then kick(ms) end
end
return 1
