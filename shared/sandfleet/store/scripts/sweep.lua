-- Node-local upkeep: drop what expired, tell how the living are used, keep their keys alive.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation
-- Returns rows {sandbox, created ms, used ms, warm since ms or '', busy 0|1}; none for another incarnation.
--@use time route story reply line use waiters sandbox blanks
local ms, node, rows = now_ms(), A[1], {}
if call('HGET', P .. 'node:' .. node, 'incarnation') ~= A[2] then return rows end

local function one(sid, until_ms)
  local key = P .. 'sandbox:' .. sid
  local sb = call('HMGET', key, 'state', 'route', 'owner', 'user', 'created', 'used')
  local _, home, inc
  if sb[1] then _, home, inc = split(sb[2]) end
  if home ~= node then
    call('ZREM', P .. 'places:' .. node, sid)
    return
  end
  if inc ~= A[2] then return end
  if sb[1] == 'creating' and until_ms <= ms then
    forget(sid, sb[2], ms)
    fail_waiters(sb[3], ms, failure('not_started', 'the creation took longer than its reservation',
      '"sandbox_id":"' .. sid .. '"'))
    story(sid, ms, 'reservation_expired', where(sb[2]))
    return
  end
  call('ZREMRANGEBYSCORE', P .. 'agents:' .. sid, '-inf', ms)
  call('ZREMRANGEBYSCORE', P .. 'busy:' .. sid, '-inf', ms)
  if sb[1] == 'live' then
    if settle(sid, sb[2], ms) then story(sid, ms, 'warm', where(sb[2])) end
    local since = call('ZSCORE', P .. 'warm:' .. node, sid)
    rows[#rows + 1] = { sid, sb[5], sb[6], since or '', has_ops(sid, ms) and 1 or 0 }
  end
  call('PEXPIRE', key, KEEP)
  call('PEXPIRE', P .. 'thread:' .. sb[3], KEEP)
  call('PEXPIRE', P .. 'id:' .. sid, KEEP)
  if sb[4] and sb[4] ~= '' then call('PEXPIRE', P .. 'user:' .. sb[4], KEEP) end
end

local places = call('ZRANGE', P .. 'places:' .. node, 0, -1, 'WITHSCORES')
for i = 1, #places, 2 do
  local member, until_ms = places[i], tonumber(places[i + 1])
  if not is_blank(member) then
    one(member, until_ms)
  elseif until_ms <= ms then
    call('ZREM', P .. 'places:' .. node, member)
    kick(ms)
  end
end
-- Operations whose record expired would otherwise stand in line for ever.
for _, id in ipairs(call('ZRANGE', P .. 'inflight:' .. node, 0, 199)) do
  if call('EXISTS', P .. 'op:' .. id) == 0 then call('ZREM', P .. 'inflight:' .. node, id) end
end
return rows
